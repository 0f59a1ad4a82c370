"""`make demo`: a year of real flights in by Spark, out by incremental backup, history exact.

Floors, from the top:

    __main__
    report traffic
    flights
"""
