"""The state of a shard: its value with its commands, its bytes, and its log.

Floors, from the top:

    witness
    log                 the state made to last, and the loop that carries out commands
    codec
    state               frontiers, readers, holds and writers; what each command does
    trace               batches, their parts, and which of them are merged
"""
