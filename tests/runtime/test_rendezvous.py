"""Processes meet, or are told what is wrong: in threads, which is as good."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import threading

import pytest

from grpojax.runtime import interrupts, rendezvous


@pytest.fixture
def port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


@pytest.fixture(autouse=True)
def in_threads(monkeypatch):
  """Only a main thread may have signals."""
  set_signal = signal.signal

  def set_in_main(*args):
    if threading.current_thread() is threading.main_thread():
      return set_signal(*args)
    return None

  monkeypatch.setattr(signal, "signal", set_in_main)


def meet(port, *who):
  """What each of some processes gets: None, or an error's text.

  Args:
    port: of all of them.
    *who: (count, process) of each.
  """

  peers = {}

  def one(count, process):
    try:
      peers[process] = rendezvous.meet("127.0.0.1", port, count, process)
    except (ValueError, interrupts.Left) as error:
      return str(error)

  with concurrent.futures.ThreadPoolExecutor() as threads:
    said = list(threads.map(one, *zip(*who, strict=True)))
  for process, others in peers.items():
    for i, peer in others.items():  # connected to each other
      peer.sendall(b"x")
      assert peers[i][process].recv(9) == b"x"
  for peer in (peer for others in peers.values() for peer in others.values()):
    peer.close()
  return said


def test_all_of_them_meet_in_any_order(port):
  assert meet(port, (3, 2), (3, 0), (3, 1)) == [None] * 3
  assert meet(port, (3, 1), (3, 2), (3, 0)) == [None] * 3  # the port is free


def test_one_alone_meets_itself(port):
  assert meet(port, (1, 0)) == [None]


@pytest.mark.parametrize(
  "who, message",
  [
    (((3, 0), (3, 1), (3, 1)), "two processes have --process_id=1"),
    (((2, 0), (3, 1)), "process 0 was started with --num_processes=2"),
    (((2, 0), (3, 2)), "process 2 (pid"),
  ],
)
def test_what_does_not_fit_is_told_to_all(port, who, message):
  said = meet(port, *who)
  assert len(set(said)) == 1 and message in said[0]


def test_one_that_never_comes(port, monkeypatch, capsys):
  monkeypatch.setattr(rendezvous, "PATIENCE", 1)
  monkeypatch.setattr(rendezvous, "_SAY_AFTER", 0.1)
  first, second = meet(port, (4, 0), (4, 2))
  assert first == second
  assert "waited 1 s" in first and "of 4 processes, 1, 3 did not" in first
  assert "process 0 of 4 waits at 127.0.0.1:" in capsys.readouterr().err
  monkeypatch.setattr(rendezvous, "PATIENCE", 0)
  (alone,) = meet(port, (4, 3))
  assert "process 0 is not there (Connection refused)" in alone


def test_a_port_that_is_in_use(port, monkeypatch):
  monkeypatch.setattr(rendezvous, "PATIENCE", 0.1)
  with socket.create_server(("", port)) as other:

    def hang_up():
      with contextlib.suppress(OSError):
        while True:
          other.accept()[0].close()

    threading.Thread(target=hang_up).start()
    first, second = meet(port, (2, 0), (2, 1))
    other.shutdown(socket.SHUT_RDWR)
  assert f"port {port} of --coordinator is in use on this machine" in first
  assert "what answers there is not process 0 of a run" in second


STRANGERS = (
  b"GET / HTTP/1.1\r\n\r\n",
  b"",
  b"[]\n",
  b"x" * 9999,
  b"[" * 4000 + b"\n",
  b'{"grpojax": "here", "process": [1], "count": 2}\n',
)


def test_strangers_keep_nobody_from_meeting(port, monkeypatch):
  listen, met = rendezvous._listen, []

  def after_strangers(port):
    listener = listen(port)
    for words in STRANGERS:
      met.append(socket.create_connection(("127.0.0.1", port)))
      met[-1].sendall(words)
      met[-1].shutdown(socket.SHUT_WR)
    return listener

  monkeypatch.setattr(rendezvous, "_listen", after_strangers)
  assert meet(port, (2, 0), (2, 1)) == [None] * 2
  for stranger in met:
    stranger.close()
  assert len(met) == len(STRANGERS)


def test_another_one_that_leaves_ends_the_first(port, monkeypatch):
  listen, guest = rendezvous._listen, []

  def come(port):
    with socket.create_connection(("127.0.0.1", port)) as guest:
      guest.sendall(b'{"grpojax": "here", "process": 1, "count": 3}\n')
      assert b"welcome" in guest.recv(100)

  def listening(port):
    listener = listen(port)
    guest.append(threading.Thread(target=come, args=(port,)))
    guest[0].start()
    return listener

  monkeypatch.setattr(rendezvous, "_listen", listening)
  assert meet(port, (3, 0)) == ["process 1 was ended before the run began"]
  guest[0].join()


def test_the_first_one_that_leaves_ends_the_others(port):
  with socket.create_server(("127.0.0.1", port)) as listener:

    def leave():
      with listener.accept()[0] as guest:
        assert b'"process": 1' in guest.recv(1000)
        guest.sendall(b'{"grpojax": "welcome"}\n')

    first = threading.Thread(target=leave)
    first.start()
    assert meet(port, (2, 1)) == ["process 0 was ended before the run began"]
    first.join()


@pytest.mark.parametrize("process", [0, 1])
def test_sigterm_is_heard_while_waiting(port, process):
  before = signal.getsignal(signal.SIGTERM)
  me = os.getpid(), signal.SIGTERM
  sender = threading.Timer(0.1, lambda: os.kill(*me))
  sender.start()
  with pytest.raises(interrupts.Left, match="SIGTERM before the run began"):
    rendezvous.meet("127.0.0.1", port, 2, process)
  assert signal.getsignal(signal.SIGTERM) == before
