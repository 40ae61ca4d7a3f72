"""Tables and pictures. Functions take records, summaries or the JSON made of them; they measure nothing."""
