"""One instance: which requests, and how many of their tokens, go into this iteration?"""
