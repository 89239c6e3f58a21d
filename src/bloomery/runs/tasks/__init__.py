"""Tasks with right and wrong answers: questions, choices and functions; intervals and comparisons of their scores."""
