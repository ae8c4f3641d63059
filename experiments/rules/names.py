"""Short names of the rules here and of the built-in ones, for the tools here and in `experiments.depth`."""

RULES = {
    "paper": "paper",
    "gated_delta": "gated_delta",
    "mdn": "experiments.rules.mdn:MomentumDelta",
    "delta_ttt": "experiments.rules.delta_ttt:DeltaTTT",
    "e2_ttt": "experiments.rules.e2_ttt:E2TTT",
    "moneta": "experiments.rules.miras:Moneta",
    "yaad_gated": "experiments.rules.miras:YaadGated",
    "memora": "experiments.rules.miras:Memora",
    "lact": "experiments.rules.lact:LaCT",
    "huber": "experiments.rules.miras:Huber",
    "yaad": "experiments.rules.miras:Yaad",
}
