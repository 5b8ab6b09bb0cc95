"""For the maintainer: `python -m harness.models --write-checksums`, after a change of the models that is meant."""

from __future__ import annotations

import argparse
import sys

from harness.models.store import CHECKSUMS, digest, write_checksums


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.models", description=__doc__)
    parser.add_argument("--write-checksums", action="store_true", required=True, help="recompute checksums.json")
    parser.parse_args()
    write_checksums()
    sys.stdout.write(f"{CHECKSUMS.name}: {digest()}\n")


if __name__ == "__main__":
    main()
