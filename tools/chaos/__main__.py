"""`make chaos`: kill runs at random moments, compare them with undisturbed ones, print a table."""

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path


def main() -> int:
    from tools.chaos import cluster, local

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many in all, shared out over the kinds")
    parser.add_argument("--a-run", type=int, default=5, help="faults that strike one run at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds, with semicolons between them")
    options = parser.parse_args()
    kinds = [k for k in local.FAULTS + cluster.FAULTS if not options.only or k in options.only.split(";")]
    draw, lines = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(prefix="titans-chaos-") as folder, ExitStack() as stack:
        cluster_nodes = stack.enter_context(cluster.nodes()) if set(kinds) & set(cluster.FAULTS) else None
        for i, kind in enumerate(kinds):
            share = options.faults // len(kinds) + (i < options.faults % len(kinds))
            arguments = (Path(folder), kind, draw, share, options.a_run)
            if kind in cluster.FAULTS and cluster_nodes:
                lines.append(cluster.series(*arguments, cluster_nodes))
            else:
                lines.append(local.series(*arguments))
            print(lines[-1].row(), flush=True)
    print(local.HEAD, *(line.row() for line in lines), sep="\n")
    return int(any(line.equal < line.runs or line.lost or line.repeated for line in lines))


if __name__ == "__main__":
    sys.exit(main())
