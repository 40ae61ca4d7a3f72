"""What a cluster does with a policy's actions, whoever computes: a simulator, a live router, a replay."""
