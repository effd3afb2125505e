"""What a run leaves behind and what it reports about its health. A leaf: it imports no agent and no environment."""
