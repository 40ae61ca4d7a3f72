"""KV of evicted and of prepared prefixes on disk, from which it is read where that is faster than computing it again.

`files` is the format, `folder` knows which blocks are where, `disk_thread` reads and writes beside the engine, and
`spill` moves blocks between the folder and the KV pool. No torch: an executor copies blocks (`BlockCopier`).
"""
