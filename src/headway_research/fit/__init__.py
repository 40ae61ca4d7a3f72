"""Read and fit public profiles of operators (`headway profile fit`), and Eq. (1) of Tetris (`headway profile fit-eq1`).

`readers` returns measurements in columns, `operators` fits them. The product ships two such fits and compiles them to
latency tables (`headway.perf.latency.device_fit`).
"""
