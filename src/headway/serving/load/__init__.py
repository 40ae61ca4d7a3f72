"""The load client: open-loop load on any OpenAI endpoint, the convoy experiment, and the demo. Live only, no torch."""
