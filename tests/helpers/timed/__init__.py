"""An instance that sleeps for as long as computing is predicted to take: everything of it is real but the model."""
