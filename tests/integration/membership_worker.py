"""A domain of one rank that joins a generation, says so, and joins again at every line of stdin."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from torchtitan_ft.config import FaultToleranceConfig
from torchtitan_ft.membership import Membership, MembershipError


def main() -> None:
    values = json.loads(sys.argv[1])
    watch = values.pop("watch", False)
    config = FaultToleranceConfig(**values)
    try:
        membership = Membership(config)
        report: list = []
        while True:
            world = membership.join(report)
            assert world is not None
            print(json.dumps(asdict(world)), flush=True)
            while watch and world.ft_index == 0:
                if found := membership.newcomers(world):
                    print(json.dumps({"newcomers": found}), flush=True)
                    watch = False
            line = sys.stdin.readline()
            if not line.strip():
                break
            report = [json.loads(line)]
        membership.leave()
    except MembershipError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
