"""The state of a shard: its value, the machine that changes it, its bytes, and its log.

Floors, from the top:

    witness
    log                 the state made to last, and the loop that carries out commands
    machine             what each command does, decided without touching anything
    holding keeping merging
    codec commands
    state
"""
