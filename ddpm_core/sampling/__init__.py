"""Images from a trained network: the plan, the drawing, and what is kept of it."""
