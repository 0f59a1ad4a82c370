"""One Arrow scan by several processes, this one among them, which read a checkpoint side by side.

Iterating holds the interpreter lock, so threads gain nothing. The span is cut into pieces, which
are handed out in the order of the keys. The scan reads what no worker has, while workers read later
pieces: one that has nothing to read is given the first piece that nobody has, behind one or a few
that the scan keeps. So the first rows wait for no worker, and each process reads what it can.

A worker writes its rows as files of Arrow IPC, which the scan maps, unlinks, and hands out.

    <store>/scans/<token>/checkpoint/     hard links: the state that the scan shows
                         /<piece>-<part>  rows on their way; a worker is a few parts ahead at most

    scan -> worker      a job | a piece | "go on", once a part | the end of the job
    worker -> scan      a part's file name | "what next?", also at the end of a piece | an error

Chosen: files rather than pipes, since the scan then copies nothing, and a worker need not wait
while another's rows are taken; processes of our own rather than `multiprocessing`'s, which runs
the caller's main module again in each.

A small span is read sooner by one process: `is_worth_workers` says which.

Invariants
1. A scan shows the state of the moment it was made, whatever is written meanwhile.
2. Whatever ends a scan (its last row, an error, a worker's death, closing it, letting go of it,
   closing the store, the death of its process) removes its directory. One is left by the machine's
   death, by the process's while all its workers are still being started, and by an interrupt while
   it is removed: opening the store removes that.
3. Workers that have a database open when a scan ends are killed; the others wait for the next scan.

Floors, from the top:

    scan
    crew
    source
"""

from kvstore.scanners.scan import SCANS_DIRECTORY, ParallelScan, Scanners, is_worth_workers

__all__ = ["SCANS_DIRECTORY", "ParallelScan", "Scanners", "is_worth_workers"]
