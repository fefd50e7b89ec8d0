"""What asv runs: one module a room.

`time_*` report; `track_*` hold what is deterministic and may gate. Timed work leaves
its pool as it found it, or goes round it, so that every repetition does the same.
"""
