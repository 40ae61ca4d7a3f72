"""Tables, pictures, CSV and trace files. Functions take records, summaries or the JSON made of them; they measure
nothing. `*_table` modules print with rich, `*_plot` modules draw with matplotlib in the style of `style`, and
`perfetto` and `live_trace` write events for ui.perfetto.dev."""
