"""Tables and files: rows that are imported, rows that are exported, and both from the shell.

Floors, from the top:

    cli
    write                   the commands that change tables
    options
    rows exports cells      rows into a table; rows as Parquet; values as words
    outside                 types that other systems have
"""

from bulk.tables.exports import ExportReport, export_parquet
from bulk.tables.rows import import_files

__all__ = ["ExportReport", "export_parquet", "import_files"]
