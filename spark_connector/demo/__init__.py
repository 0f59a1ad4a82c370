"""`make demo`: a year of real flights in by Spark, out by incremental backup, history exact."""
