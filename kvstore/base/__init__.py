"""What every module may use: time, spans of keys, arguments, forks, notices, meters, digests.

Nothing here knows a store. The clock is the only place that reads the time.
"""
