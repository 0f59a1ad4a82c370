"""One Arrow scan by several processes, which read a checkpoint side by side.

Iterating holds the interpreter lock, so threads gain nothing. The span is cut into pieces, which
are handed out in the order of the keys. The scan's own process reads pieces too: it keeps the next
one or few for itself, and gives an idle worker the first free piece behind them. So the first rows
wait for no worker, and no process is idle.

A worker writes its rows to files of Arrow IPC. The scan maps and unlinks them, and yields the rows.

    <store>/scans/<token>/checkpoint/     hard links: the state that the scan shows
                         /<piece>-<part>  rows of a worker, which is a few parts ahead at most

    scan -> worker      a job | a piece | `GO_ON`, once a part | the end of the job
    worker -> scan      a part's file name | "what next?", also at the end of a piece | an error

Files, not pipes: the scan copies nothing, and a worker need not wait while another's rows are
taken. Processes of our own, not `multiprocessing`'s, which run the caller's main module again.

One process reads a small span sooner: `is_worth_workers` decides.

Invariants
1. A scan shows the state of the moment at which it was made. Later writes do not appear.
2. The end of a scan removes its directory. It ends by its last row, an error, a worker's death,
   `close`, its finalizer, the closing of the store, or the death of its process. Three ends leave
   the directory to the next opening of the store: a crash of the machine, the death of the process
   while all workers are starting, and an interrupt during the removal.
3. Workers that have a database open when a scan ends are killed; the others wait for the next scan.

Floors, from the top:

    scan
    crew
    source
"""

from kvstore.scanners.scan import SCANS_DIRECTORY, ParallelScan, Scanners, is_worth_workers

__all__ = ["SCANS_DIRECTORY", "ParallelScan", "Scanners", "is_worth_workers"]
