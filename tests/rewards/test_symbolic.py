import sys

import pytest

from grpojax.rewards import functions
from grpojax.rewards.pool import Pool


def test_without_math_verify_it_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "math_verify", None)
  monkeypatch.delitem(sys.modules, "grpojax.rewards.symbolic", raising=False)
  with pytest.raises(ValueError, match=r"pip install 'grpojax\[math\]'"):
    functions.resolve("math_verify")


@pytest.mark.slow
def test_symbolic_answers_in_a_worker():
  pytest.importorskip("math_verify")
  cases = [
    (r"\boxed{x(x+1)}", "x^2+x", 1),
    (r"\boxed{2(x+1)}", "2x+1", 0),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"The answer is $\frac{\sqrt{2}}{2}$.", r"\frac{1}{\sqrt{2}}", 1),
    (r"\boxed{(2, 1)}", "(1, 2)", 0),
    (r"\boxed{5}", "6", 0),
    (r"\boxed{1{,}234.50}", "1234.5", 1),
    (r"\boxed{__import__('os')._exit(1)}", "5", 0),
    (r"\boxed{{{{", "5", 0),
    ("", "5", 0),
    ("#### NaN", "NaN", 0),
    ("The answer is not 5", "5", 0),
    (r"\boxed{y+x}", "x+y", 1),
  ]
  group = [("", text, {"answer": answer}) for text, answer, _ in cases]
  with Pool(["math_verify"], workers=1, timeout=30) as pool:
    sent = pool.submit([[item] for item in group], 1)
    rewards = pool.collect([sent]).rewards[:, 0]
  for (text, _, expected), reward in zip(cases, rewards, strict=True):
    assert reward == expected, text
