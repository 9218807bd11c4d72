"""MLflow: its client, its runs, and a tracker that survives outages."""
