def search(*a):
  raise NotImplementedError


def lines(*a):
  return []
