"""Tables, pictures, CSV and trace files of results. Functions take records, summaries or the JSON made of them; they
measure nothing.

Start with `tables` (rich), `plots` (matplotlib) and `perfetto` (ui.perfetto.dev).
"""
