"""What a study found, as tables, figures and pages; reads results and writes nothing else."""
