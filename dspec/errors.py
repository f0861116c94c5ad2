"""The one exception type for mistakes that a user can mend."""


class UserError(ValueError):
  """A wrong option, file or environment. The message names it and says what to do.

  `dspec.main` prints the message without a traceback and exits with status 2.
  """
