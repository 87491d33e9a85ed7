"""`symmem` and `python -m symmem`: becomes the program that comes with the package."""

import os
import pathlib
import sys
from typing import NoReturn

PROGRAM = pathlib.Path(__file__).with_name("bin") / "symmem"


def main() -> NoReturn:
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])


if __name__ == "__main__":
    main()
