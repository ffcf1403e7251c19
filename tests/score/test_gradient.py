import numpy as np
import pytest

torch = pytest.importorskip("torch")

from unskew.score import HeadStates, head_gradients  # noqa: E402


def test_closed_form_is_autograds_gradient_of_the_head():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 5, generator=generator)
    weight = torch.randn(13, 5, generator=generator, requires_grad=True)
    responses = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11]]
    coefficients = np.random.default_rng(0).normal(size=(3, 11))
    ids = torch.tensor([token for response in responses for token in response])
    logp = (hidden @ weight.T).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    gradients = [
        torch.autograd.grad((torch.from_numpy(c) * logp).sum(), weight, retain_graph=True)[0].double().ravel()
        for c in coefficients
    ]
    expected = torch.stack(gradients) @ torch.stack(gradients).T
    states = HeadStates(hidden, lambda h: h @ weight.T, [[0], [0]], responses)
    np.testing.assert_allclose(head_gradients(states, coefficients), expected.numpy(), rtol=1e-4)
