"""Pipeline schedules as data: tables of actions per rank, made by name or read from a file, checked, and lowered.

table = lower(generate("1f1b", ranks=4, micro_batches=8), zero=3)
peaks = validate(table)
print(table)  # rank 0: 0UNSHARD 0F0 0SEND_F0 ...
"""

from interlace.schedule.generators import FORMS, chunks_of, generate
from interlace.schedule.lower import lower
from interlace.schedule.table import Action, Kind, Table, parse_csv, read_csv
from interlace.schedule.validate import Peaks, validate

__all__ = [
    "FORMS",
    "Action",
    "Kind",
    "Peaks",
    "Table",
    "chunks_of",
    "generate",
    "lower",
    "parse_csv",
    "read_csv",
    "validate",
]
