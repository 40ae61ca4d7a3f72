"""Many engines behind one endpoint: a placement policy decides who computes what. No torch in here."""
