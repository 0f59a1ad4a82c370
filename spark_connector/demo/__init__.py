"""`make demo`: Spark loads a year of real flights, incremental backups write them out again.

Floors, from the top:

    __main__ known restated
    report traffic
    flights releases place
"""
