"""The forms (implementations) of the operator; all of them compute what `reference` computes."""
