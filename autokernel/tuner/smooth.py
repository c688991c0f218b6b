"""A smooth guess of log latency over a whole space from few measurements: a Gaussian process over knob tables.

The covariance of two points is a mix of a product and a mean over knobs of Matern-3/2 terms, so that a knob's main
effect carries over to points that differ in all other knobs. As a knob has few values, a term is a small table, and the
covariance of all points with the measured ones is a matrix product of indicators and the log of these tables.

Length scales, mix and noise are not fitted to one optimum, which few measurements do not determine: settings are drawn,
the likeliest are varied, and the best of all are averaged by their likelihood (importance sampling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autokernel.tuner.coding import Floats

DRAWS = 48
"""Settings drawn from the prior, of which PARENTS are varied into as many as VARIED."""
PARENTS = 4
VARIED = 32
AVERAGED = 6
"""The likeliest settings, over which predictions are averaged."""

LEAST_SCALE, MOST_SCALE = 0.2, 4.0
"""Length scales, in units of a knob's whole range."""
SCALE_MODE, SCALE_LOG_SD = 0.8, 1.4
"""Of the length scales' lognormal prior: a knob acts over its whole range unless measurements say otherwise."""
MOST_ADDITIVE = 0.8
LEAST_NOISE, MOST_NOISE = 0.003, 0.1
"""Variance of a measurement's error and of what the model misses, relative to the spread of the measurements."""
JITTER = 1e-6
PRIOR_ROWS = 2
"""Weight of the prior belief that residuals are as wide as the data, in measurements."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of `n` kernels: length scales [n, knobs], share of the additive part [n] and noise variance [n]."""

    scales: Floats
    additive: Floats
    noise: Floats

    def at(self, rows: NDArray[np.intp]) -> Settings:
        """Those numbered `rows`."""
        return Settings(self.scales[rows], self.additive[rows], self.noise[rows])

    def joined(self, other: Settings) -> Settings:
        """These and then `other`."""
        return Settings(
            np.vstack([self.scales, other.scales]),
            np.append(self.additive, other.additive),
            np.append(self.noise, other.noise),
        )


class Belief:
    """Mean and deviation of log latency at each point of a pool; `believe` takes a choice as measured at its mean."""

    def __init__(self, fitted: Smooth, pool: Floats) -> None:
        self._fitted, self._pool = fitted, pool
        self._roots: list[Floats] = []
        self._believed: list[list[Floats]] = [[] for _ in fitted.weights]
        means, variances = [], []
        for h in range(len(fitted.weights)):
            root = np.linalg.solve(fitted.factors[h], fitted.covariance(h, fitted.rows, pool))
            self._roots.append(root)
            means.append(root.T @ fitted.whitened[h])
            variances.append(np.maximum(1.0 - (root * root).sum(axis=0), JITTER))
        self._means, self._variances = np.array(means), np.array(variances)

    def means(self) -> Floats:
        """[settings, points]"""
        shown: Floats = self._means * self._fitted.spread + self._fitted.level
        return shown

    def deviations(self) -> Floats:
        """[settings, points]"""
        shown: Floats = np.sqrt(self._variances * self._fitted.variances[:, None]) * self._fitted.spread
        return shown

    def expected_gain(self, best: float) -> Floats:
        """Expected improvement of log latency over `best` [points], averaged over the settings."""
        deviation = self.deviations()
        z = (best - self.means()) / deviation
        gain = deviation * (z * _below(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
        averaged: Floats = self._fitted.weights @ gain
        return averaged

    def mean(self, index: int) -> float:
        """The averaged mean at one point of the pool."""
        return float(self._fitted.weights @ self.means()[:, index])

    def believe(self, index: int) -> None:
        """Take the pool's point `index` as measured where it is expected: means stay, its surroundings get certain."""
        fitted, chosen = self._fitted, self._pool[index : index + 1]
        for h, root in enumerate(self._roots):
            shared = fitted.covariance(h, chosen, self._pool)[0] - root[:, index] @ root
            for former in self._believed[h]:
                shared -= former[index] * former
            row = shared / math.sqrt(self._variances[h][index] + fitted.settings.noise[h])
            self._believed[h].append(row)
            self._variances[h] = np.maximum(self._variances[h] - row * row, JITTER)


class Smooth:
    """The model fitted to `rows` (indicators) and their log latencies. `extra_noise` is of each row, from 0 on."""

    def __init__(
        self,
        distances: Sequence[Floats],
        rows: Floats,
        log_latency: Floats,
        extra_noise: Floats,
        rng: np.random.Generator,
    ) -> None:
        self._distances = distances
        self._offsets = np.concatenate([[0], np.cumsum([len(table) for table in distances])])
        self.rows, self._extra = rows, extra_noise
        self.level, self.spread = float(log_latency.mean()), float(log_latency.std()) or 1.0
        z = (log_latency - self.level) / self.spread
        drawn = _drawn(len(distances), rng)
        likely = self._evidence(drawn, z)[0].argsort()[::-1][:PARENTS]
        settings = drawn.at(likely).joined(_varied(drawn.at(likely), rng))
        evidence, factors, whitened, variances = self._evidence(settings, z)
        kept = evidence.argsort()[::-1][:AVERAGED]
        weights = np.exp(evidence[kept] - evidence[kept[0]])
        self.settings, self.weights = settings.at(kept), weights / weights.sum()
        self.factors, self.whitened, self.variances = factors[kept], whitened[kept], variances[kept]
        self._log = self._log_tables(self.settings.scales)
        self._plain = self._plain_tables(self._log)

    def covariance(self, h: int, left: Floats, right: Floats) -> Floats:
        """Of the rows of `left` with those of `right` under setting `h`."""
        return _mixed(self._log[h], self._plain[h], self.settings.additive[h], left, right)

    def _plain_tables(self, log_tables: Floats) -> Floats:
        """The terms themselves over the number of knobs, zero where two values are not of one knob."""
        knob = np.repeat(np.arange(len(self._distances)), np.diff(self._offsets))
        plain: Floats = np.exp(log_tables) * (knob[:, None] == knob[None, :]) / len(self._distances)
        return plain

    def _log_tables(self, scales: Floats) -> Floats:
        """Per setting, the logs of all knobs' Matern terms as one block-diagonal matrix."""
        size = self._offsets[-1]
        tables: Floats = np.zeros((len(scales), size, size))
        for k, distance in enumerate(self._distances):
            steps = math.sqrt(3) * distance[None] / scales[:, k, None, None]
            low, high = self._offsets[k], self._offsets[k + 1]
            tables[:, low:high, low:high] = np.log1p(steps) - steps
        return tables

    def _evidence(self, settings: Settings, z: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Log posterior, Cholesky factor, whitened data and variance of each setting."""
        tables = self._log_tables(settings.scales)
        noise = settings.noise[:, None] * (1 + self._extra[None]) + JITTER
        covariances = np.stack(
            [
                _mixed(table, plain, additive, self.rows, self.rows) + np.diag(own)
                for table, plain, additive, own in zip(
                    tables, self._plain_tables(tables), settings.additive, noise, strict=True
                )
            ]
        )
        factors: Floats = np.asarray(np.linalg.cholesky(covariances), dtype=np.float64)
        columns = np.broadcast_to(z, (len(tables), len(z)))[..., None]
        whitened: Floats = np.asarray(np.linalg.solve(factors, columns)[..., 0], dtype=np.float64)
        variances: Floats = ((whitened**2).sum(axis=1) + PRIOR_ROWS) / (len(z) + PRIOR_ROWS)
        determinant = np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(axis=1)
        prior = (np.log(settings.scales / SCALE_MODE) ** 2).sum(axis=1) / (2 * SCALE_LOG_SD**2)
        evidence: Floats = -determinant - 0.5 * (len(z) + PRIOR_ROWS) * np.log(variances) - prior
        return evidence, factors, whitened, variances


def _drawn(knobs: int, rng: np.random.Generator) -> Settings:
    """Settings from the prior, the first with all scales at its mode."""
    scales = np.exp(rng.uniform(math.log(LEAST_SCALE), math.log(MOST_SCALE), (DRAWS, knobs)))
    scales[0] = SCALE_MODE
    noise = np.exp(rng.uniform(math.log(LEAST_NOISE), math.log(MOST_NOISE), DRAWS))
    return Settings(scales, rng.uniform(0.0, MOST_ADDITIVE, DRAWS), noise)


def _varied(parents: Settings, rng: np.random.Generator) -> Settings:
    """Settings near `parents`, VARIED in all."""
    near = parents.at(np.arange(VARIED) % len(parents.noise))
    return Settings(
        np.clip(near.scales * np.exp(rng.normal(0, 0.5, near.scales.shape)), LEAST_SCALE / 2, 2 * MOST_SCALE),
        np.clip(near.additive + rng.normal(0, 0.15, VARIED), 0, 1),
        np.clip(near.noise * np.exp(rng.normal(0, 0.5, VARIED)), LEAST_NOISE, MOST_NOISE),
    )


def _mixed(log_table: Floats, plain_table: Floats, additive: float, left: Floats, right: Floats) -> Floats:
    """Covariance of the rows of `left` with those of `right`: products of the knobs' terms, mixed with their mean."""
    product = np.exp((left @ log_table) @ right.T)
    mixed: Floats = (1 - additive) * product + additive * ((left @ plain_table) @ right.T)
    return mixed


def _below(z: Floats) -> Floats:
    """Standard normal distribution function."""
    from scipy.special import ndtr

    probability: Floats = ndtr(z)
    return probability
