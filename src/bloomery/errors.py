"""The one exception that a person is meant to read."""


class UserError(Exception):
    """What is wrong, where, and what to do about it. The command line prints it and exits with `code`."""

    def __init__(self, problem: str, *, where: str = "", remedy: str = "", code: int = 1) -> None:
        super().__init__(problem, where, remedy)
        self.problem, self.where, self.remedy, self.code = problem, where, remedy, code

    def __str__(self) -> str:
        parts = [f"error: {self.problem}"]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.remedy:
            parts.append(f"mend:  {self.remedy}")
        return "\n".join(parts)
