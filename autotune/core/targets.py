"""Other trainers that a profile can be written for. By itself, as the command line names them before it loads more."""

from typing import Literal

Target = Literal["hf-trainer"]
