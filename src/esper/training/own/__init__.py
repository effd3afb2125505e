"""Growing one model, a person's own or a task's host: data, objective, optimizer, the run and its report."""
