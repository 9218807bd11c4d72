"""MLflow: its client, its runs, and a tracker that outlives outages."""
