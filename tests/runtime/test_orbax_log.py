"""What is told by Orbax's log alone."""

import logging
import time

import pytest

from grpojax.runtime import distributed, orbax_log


class Stuck:
  """A save that waits for another process."""

  def result(self, timeout):
    time.sleep(timeout)
    if not orbax_log._failures:
      report(OSError("the disk is full"))
    raise TimeoutError


def report(error, path="/orbax/checkpoint/saver.py"):
  info = (type(error), error, None)
  logging.getLogger("absl").handle(
    logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), info)
  )


@pytest.fixture(autouse=True)
def several(monkeypatch):
  monkeypatch.setattr(distributed, "count", lambda: 2)
  monkeypatch.setattr(orbax_log, "_EVERY", 0.01)
  orbax_log.forget()  # what other tests have made fail
  yield
  orbax_log.forget()


@pytest.mark.parametrize("timeout", [None, 0.0])
def test_what_fails_here_is_raised_while_others_wait_for_it(timeout):
  with pytest.raises((OSError, TimeoutError)):
    orbax_log.result(Stuck(), timeout)
  with pytest.raises(OSError, match="the disk is full"):
    orbax_log.result(Stuck(), timeout)


def test_a_new_save_has_not_failed(monkeypatch):
  report(ValueError("of somebody else"), "/elsewhere/saver.py")
  assert orbax_log.failed_alone() is None
  report(OSError("the disk is full"))
  assert isinstance(orbax_log.failed_alone(), OSError)
  monkeypatch.setattr(distributed, "count", lambda: 1)
  assert orbax_log.failed_alone() is None  # Orbax says so itself
  monkeypatch.setattr(distributed, "count", lambda: 2)
  orbax_log.forget()
  assert orbax_log.failed_alone() is None


class Late:
  """A save that Orbax itself gives up."""

  def result(self, timeout):
    del timeout
    raise TimeoutError("its own")


def test_orbax_gives_up(monkeypatch):
  monkeypatch.setattr(orbax_log, "_EVERY", 60)
  with pytest.raises(TimeoutError, match="its own"):
    orbax_log.result(Late(), None)
