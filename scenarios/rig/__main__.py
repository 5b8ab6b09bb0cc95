"""``python3 -m rig``: run the cell that the environment names."""

import sys

from rig.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
