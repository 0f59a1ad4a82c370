"""asof-bench: point-in-time joins by several libraries, over one history, with exact answers.

    python -m benchmarks.asof --versions 300000 --write

A history has late events, restated events, and labels from 0.1 % to 100 % of its versions. Two
questions are asked of it. `event`: the newest event at or before the label's time, as restated
last. `known`: the same among the events that were known at the label's time, as a model was served.

    data       makes the history and the labels, and answers both questions exactly
    runners    one way to join for each library; a process each
    run        asks all runners, and writes the page with its picture
"""
