"""The gradient that a set of weights gives the head, and how far it is turned from another."""

import numpy as np
import torch

from unskew.score._head import HeadStates

__all__ = ["head_gradients"]


def head_gradients(states: HeadStates, coefficients: np.ndarray) -> np.ndarray:
    """Inner products of the gradients Σ_t c_t ∂ log p(y_t) / ∂W of the head's weight W, float64 (K, K).

    ∂ log p(y_t) / ∂W = (e_{y_t} − p_t) h_tᵀ in closed form, so no backward pass is needed.

    Args:
        states: N tokens of a scorer at temperature 1.
        coefficients: c, one row a gradient, float64 (K, N); weight × advantage, for example.

    Returns:
        G with G[i, j] = ⟨g_i, g_j⟩; cosine = G[i, j] / √(G[i, i] G[j, j]).
    """
    total: torch.Tensor | None = None
    for start, hidden, residual in states.residuals():
        c = torch.from_numpy(np.nan_to_num(coefficients[:, start : start + len(hidden)], nan=0.0)).to(residual)
        part = torch.einsum("kn,nv,nd->kvd", c, residual, hidden.to(residual.dtype))
        total = part if total is None else total + part
    if total is None:
        return np.zeros((len(coefficients), len(coefficients)))
    flat = total.reshape(len(coefficients), -1).double()
    return (flat @ flat.T).cpu().numpy()
