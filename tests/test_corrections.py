"""The numbers in docs/privacy.md, "Corrections to the papers", recomputed.

Every bold number in a row of those tables is the value, to the digits shown, of the function here that has the row's
key. Rows without a function must have no bold number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import dp_accounting
import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting import pld, rdp
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate, optimize, special, stats

from bismarck_dp.losses import LOSSES
from bismarck_dp.mechanisms import gaussian_multiplier
from bismarck_dp.penalties import L2
from bismarck_dp.sensitivity import Schedule, output_sensitivity
from bismarck_dp.steps import Step

Floats = npt.NDArray[np.float64]
Loss = privacy_loss_distribution.PrivacyLossDistribution

PAGE = (Path(__file__).resolve().parents[1] / "docs/privacy.md").read_text()
DISCRETISATION = 1e-4
ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

ROWS: dict[str, Callable[[], list[float]]] = {}


def row(function: Callable[[], list[float]]) -> Callable[[], list[float]]:
    """Registers a function as the source of the row whose key is the first part of its name."""
    ROWS[function.__name__.partition("_")[0].upper()] = function
    return function


# ---- the page ----

SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
BOLD = re.compile(r"\*\*([\d.]+)(?: · 10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?\*\*")


def corrections() -> str:
    """The section, heading excluded."""
    return re.split(r"^## ", PAGE.partition("\n## Corrections to the papers\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows_of(section: str) -> dict[str, str]:
    """The rows of all tables by their key, a letter and a number."""
    return {match[1]: match[2] for match in re.finditer(r"^\| ([A-Z]\d+) \|(.*)\|$", section, re.MULTILINE)}


def bold_numbers(text: str) -> list[tuple[float, float]]:
    """Each bold number with half a unit of its last digit."""
    found = []
    for digits, power in BOLD.findall(text):
        scale = 10.0 ** int(power.translate(SUPERSCRIPTS) or 0)
        found.append((float(digits) * scale, 0.5 * 10.0 ** -len(digits.partition(".")[2]) * scale))
    return found


def test_the_reading_itself() -> None:
    section = "| | paper |\n|---|---|\n| A1 | x × **5.3** and **1.1 · 10⁻⁷** |\n| B12 | no \\|β\\| **bold** |\n"
    rows = rows_of(section)
    assert set(rows) == {"A1", "B12"}
    assert bold_numbers(rows["A1"]) == [
        (pytest.approx(5.3), pytest.approx(0.05)),
        (pytest.approx(1.1e-7), pytest.approx(5e-9)),
    ]
    assert bold_numbers(rows["B12"]) == []


def test_every_bold_number_is_computed() -> None:
    rows = rows_of(corrections())
    assert {key for key, text in rows.items() if bold_numbers(text)} == set(ROWS)
    outside = [line for line in corrections().splitlines() if not line.startswith("|")]
    assert not bold_numbers("\n".join(outside)), "bold numbers outside the tables are not checked"


# ---- Wu et al. 2017 ----


def bolton_sensitivity(
    loss: str, n: int, batch_size: int, passes: int, strength: float, average: str = "none"
) -> float:
    """Our sensitivity for `replace`, steps min(1/beta, 1/(gamma t)) and rows of norm 1 (L = 1, huber with h = 0.1)."""
    smoothness = LOSSES[loss].curvature(0.1)
    assert smoothness is not None
    step = Step("strongly-convex", beta=smoothness + strength, gamma=strength)
    return output_sensitivity(Schedule(n, batch_size, passes, 1, average, "once", step, L2(strength)), 2.0)


def huber_slope(margin: float, h: float = 0.1) -> float:
    """The derivative of the Huber SVM loss with label 1."""
    return float(LOSSES["huber"].slope(np.array(margin), np.array(1.0), h))


@row
def w1_batches() -> list[float]:
    """The recursion over 2 L / (gamma n b)."""
    return [bolton_sensitivity("huber", 60_000, 50, 10, 1e-3) / (2 / (1e-3 * 60_000 * 50))]


@row
def w2_short_batch() -> list[float]:
    """The distance of two one-pass runs that differ in the only row of the last batch: a mean over r by one over b."""
    n, b, eta = 101, 50, 0.01

    def distance(divisor: Callable[[int], int]) -> float:
        ends = []
        for sign in (1.0, -1.0):
            x = np.tile([0.0, 1.0], (n, 1))
            x[-1] = [sign, 0.0]
            w = np.zeros(2)
            for start in range(0, n, b):
                batch = x[start : start + b]
                w = w - eta * sum(huber_slope(w @ xi) * xi for xi in batch) / divisor(len(batch))
            ends.append(w)
        return float(np.linalg.norm(ends[0] - ends[1]))

    return [distance(lambda r: r) / distance(lambda _: b)]


@row
def w3_averaging() -> list[float]:
    """The recursion for the average of all iterates over that for the last one."""
    runs = [("logistic", 5000, 1, 1, 0.01), ("logistic", 60_000, 1, 1, 0.01), ("logistic", 60_000, 50, 10, 0.001)]
    return [bolton_sensitivity(*run, average="all") / bolton_sensitivity(*run) for run in runs]


def passes_until(x: Floats, strength: float, least: float | None, most: int) -> tuple[float, list[float]]:
    """One-dimensional PSGD on huber with labels 1: the weight when the objective fell by less than `least`, or after
    `most` passes, and the objective after each pass.
    """
    beta, w, t, objectives = 5 + strength, 0.0, 0, []
    for _ in range(most):
        for value in x.tolist():
            t += 1
            eta, margin = min(1 / beta, 1 / (strength * t)), w * value
            slope = 0.0 if margin > 1.1 else -1.0 if margin < 0.9 else -(1.1 - margin) / 0.2
            w = (1 - eta * strength) * w - eta * slope * value
        losses = LOSSES["huber"].value(w * x, np.ones(len(x)), 0.1)
        objectives.append(float(losses.mean()) + strength / 2 * w * w)
        if least is not None and len(objectives) > 1 and objectives[-2] - objectives[-1] < least:
            break
    return w, objectives


@row
def w4_stopping() -> list[float]:
    """The smallest distance over some orders, n - 1 rows sqrt(5 / (3 n)) and one row 1 or -1; and 2 L / (gamma n)."""
    n, strength = 20_000, 5e-5
    rng = np.random.default_rng(1)
    distances = []
    for order in (np.arange(n), np.roll(np.arange(n), n // 2), rng.permutation(n), rng.permutation(n)):
        tables = []
        for last in (1.0, -1.0):
            x = np.full(n, math.sqrt(5 / (3 * n)))
            x[-1] = last
            tables.append(x[order])
        falls = [-np.diff(passes_until(x, strength, None, 2)[1])[0] for x in tables]
        threshold = float(np.mean(falls))  # one of the two stops after two passes, the other goes on
        first, second = (passes_until(x, strength, threshold, 4)[0] for x in tables)
        distances.append(abs(first - second))
    assert max(distances) - min(distances) < 0.1
    return [min(distances), 2 / (strength * n)]


@row
def w5_harmonic() -> list[float]:
    """By how many percent 1/n^c + ln(k)/n is below the sum over passes of 1/(n^c + j n + 1)."""

    def short(c: float, n: int, k: int) -> float:
        total = float(np.sum(1 / (n**c + np.arange(k) * n + 1.0)))
        return 100 * (1 - (1 / n**c + math.log(k) / n) / total)

    assert max(short(c, n, k) for c in (0.0, 0.3, 0.5) for n in (2, 10, 1000, 10**6) for k in (2, 10, 1000)) < 0
    return [short(0.85, 100_000, 9), short(0.7, 1366, 14)]


@row
def w6_lipschitz() -> list[float]:
    """L of the data loss over 1 + lambda R, R = 1/lambda."""
    strength = 0.01
    return [LOSSES["logistic"].steepness(0.0) / (1 + strength * (1 / strength))]


@row
def w7_ball() -> list[float]:
    """The noise of Appendix E has density proportional to E1(|z|), in units of Delta/epsilon and for every d, because
    a radius l * U^(1/d), l ~ Gamma(d), has density proportional to r^(d-1) E1(r). The loss for a shift by 1 at a
    distance of 1e-6, and delta(1) = E max(0, 1 - e^(1 - loss)).
    """

    def delta(d: int) -> float:
        rng = np.random.default_rng(d)
        count = 400_000
        z = rng.standard_normal((count, d))
        z *= (rng.gamma(d, 1.0, count) * rng.random(count) ** (1 / d) / np.linalg.norm(z, axis=1))[:, None]
        here = special.exp1(np.linalg.norm(z, axis=1))
        z[:, 0] -= 1
        there = special.exp1(np.linalg.norm(z, axis=1))
        return float(np.maximum(0, 1 - math.e * there / here).mean())

    pieces = [(-40.0, 0.0), (0.0, 1.0), (1.0, 40.0)]
    line = [max_gap(lambda x: special.exp1(abs(x)) / 2, 1.0, *piece) for piece in pieces]
    assert delta(1) == pytest.approx(sum(line), abs=3e-3)
    loss = math.log(special.exp1(1e-6) / special.exp1(1 + 1e-6))
    return [loss, delta(1), delta(2), delta(5)]


def max_gap(density: Callable[[float], float], epsilon: float, low: float, high: float) -> float:
    """The integral of max(0, f(x) - e^epsilon f(x - 1))."""
    return float(
        integrate.quad(lambda x: max(0.0, density(x) - math.exp(epsilon) * density(x - 1)), low, high, limit=200)[0]
    )


def classic_multiplier(epsilon: float, delta: float) -> float:
    """sqrt(2 ln(1.25 / delta)) / epsilon."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


@row
def w8_gaussian() -> list[float]:
    """Where the classic multiplier equals the analytic one, and their ratio."""
    delta = 1e-6

    def ratio(epsilon: float) -> float:
        return gaussian_multiplier(epsilon, delta) / classic_multiplier(epsilon, delta)

    return [optimize.brentq(lambda e: ratio(e) - 1, 1, 20), *(ratio(e) for e in (0.1, 0.5, 1, 10))]


@row
def w9_projection() -> list[float]:
    """The squared norm of a unit row times N(0, 1/50) entries is chi-square with 50 degrees, over 50."""
    return [100 * stats.chi2.sf(50, 50), math.sqrt(stats.chi2.isf(0.01, 50) / 50)]


@row
def w10_one_against_all() -> list[float]:
    """sqrt(10) sigma(epsilon, delta) over sigma(epsilon / 10, delta / 10)."""
    epsilon, delta = 1.0, 60_000.0**-2
    return [math.sqrt(10) * gaussian_multiplier(epsilon, delta) / gaussian_multiplier(epsilon / 10, delta / 10)]


def bst14_sigma(epsilon: float, n: int, passes: int) -> float:
    """Lines 4 to 7 of Algorithms 4 and 5, with delta = 1/n^2."""
    steps = passes * n
    delta1 = 1 / n**2 / steps
    slope = math.sqrt(2 * steps * math.log(1 / delta1))
    epsilon1 = optimize.brentq(lambda e: steps * e * math.expm1(e) + slope * e - epsilon, 1e-12, 1)
    return classic_multiplier(min(1.0, n * epsilon1 / 2), delta1)


def poisson_epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon of a Poisson-sampled Gaussian of sensitivity 1, under add or remove."""
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant = pld.PLDAccountant(ADD_OR_REMOVE, value_discretization_interval=DISCRETISATION)
    return float(accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps)).get_epsilon(delta))


@row
def w12_bst14_in_a_scan() -> list[float]:
    """Epsilon of k Gaussians of sensitivity 2 (replace) and 1 (zero-out), one for each pass."""
    n, passes = 60_000, 10
    return [
        dp_accounting.get_epsilon_gaussian(bst14_sigma(claimed, n, passes) / jump / math.sqrt(passes), 1 / n**2)
        for jump in (2, 1)
        for claimed in (1.0, 0.1)
    ]


@row
def w13_bst14_iota() -> list[float]:
    """2 / 1, and 2 / sqrt(2)."""
    iota = 2 * LOSSES["logistic"].steepness(0.0)
    return [iota / 1, iota / math.sqrt(iota)]


@row
def w14_bst14_with_sampling() -> list[float]:
    """The smallest sigma that an accountant accepts (between two values), the printed one, and their ratio."""
    n, passes = 60_000, 10
    printed = bst14_sigma(1.0, n, passes)
    around = [0.61, 0.62]
    epsilons = [poisson_epsilon(sigma, 1 / n, passes * n, 1 / n**2) for sigma in around]
    assert epsilons[0] > 1 > epsilons[1]
    least = float(np.interp(-1.0, np.negative(epsilons), around))
    return [least, printed, least / printed]


# ---- Damaskinos et al. 2021 ----


def ridge_update(x: float, y: float, alpha: float, v: float, batch: int, scale: float, bound: float) -> float:
    """Steps 7 and 8 of Algorithm 1 for the loss (z - y)^2 / 2 in one dimension: zeta minimises eq. (8), scale being
    lambda N, and is cut to the bound.
    """
    zeta = (y - alpha - x * v / scale) / (1 + batch * x * x / scale)
    return max(-bound, min(bound, zeta))


@row
def s1_lemma_1() -> list[float]:
    """The largest change of (alpha, v) over a grid of states, by sqrt(2) C: the row zeroed, and replaced."""
    bound, zeroed, replaced = 0.5, 0.0, 0.0
    for alpha in (-3.0, 0.0, 3.0):
        for v in (-900.0, 0.0, 900.0):
            ends = {
                (x, y): ridge_update(x, y, alpha, v, 10, 100.0, bound) for x in (-1.0, 0.0, 1.0) for y in (-1.0, 1.0)
            }
            for (x, y), zeta in ends.items():
                for (x2, y2), zeta2 in ends.items():
                    change = math.hypot(zeta - zeta2, zeta * x - zeta2 * x2)
                    if x2 == 0 and y == y2:
                        zeroed = max(zeroed, change)
                    replaced = max(replaced, change)
    return [zeroed / (math.sqrt(2) * bound), replaced / (math.sqrt(2) * bound)]


@row
def s2_visible_sample() -> list[float]:
    """Sigma calibrated to (1, 1e-3) with amplification, then epsilon of the row's 50 visits without."""
    rows, batch, passes, delta = 347_786, 1000, 50, 1e-3

    def event(sigma: float) -> dp_accounting.DpEvent:
        step = dp_accounting.PoissonSampledDpEvent(batch / rows, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(step, passes * rows // batch)

    guess = dp_accounting.LowerEndpointAndGuess(0.1, 2.0)
    sigma = dp_accounting.calibrate_dp_mechanism(rdp.RdpAccountant, event, 1.0, delta, guess, tol=1e-3)
    return [dp_accounting.get_epsilon_gaussian(sigma / math.sqrt(passes), delta)]


@row
def s3_shuffled_batches() -> list[float]:
    """Epsilon if sampling were Poisson; and log((P - delta) / Q) for the event that some batch sum exceeds a level.

    All other rows have gradient -1, the row has 1 (P) or counts for nothing (Q), so that its batch, wherever it is,
    has a mean 2 or 1 above that of the other batches.
    """
    sigma, batches, delta = 1.0, 1000, 1e-6
    level = np.linspace(0, 10, 10_001)
    others = (batches - 1) * stats.norm.logcdf(level / sigma)
    p, q = (-np.expm1(others + stats.norm.logcdf((level - mean) / sigma)) for mean in (2, 1))
    with np.errstate(invalid="ignore"):
        lower = float(np.nanmax(np.log((p - delta) / q)))
    return [poisson_epsilon(sigma, 1 / batches, batches, delta), lower]


@row
def s4_noise_on_v() -> list[float]:
    """C over sqrt(2) C, and 2 C over 2 sqrt(2) C."""
    absent, replaced = 1 / math.hypot(1, 1), 2 / math.hypot(2, 2)
    assert absent == pytest.approx(replaced)
    return [absent]


@row
def s5_primal() -> list[float]:
    """2 C sqrt(L) over 2 C sqrt(L (L + 1))."""
    batch = 1000
    return [math.sqrt(batch) / math.sqrt(batch * (batch + 1))]


@row
def s7_delta() -> list[float]:
    """N delta for the training tables of Appendix E."""
    return [1e-3 * rows for rows in (347_786, 24_420, 6218)]


@row
def s8_sequential_memory() -> list[float]:
    """The largest difference, over C, of the move that a row makes alone after a batch in which it saw another row move
    by C or by -C, and kept that in alpha; lambda N = 1.
    """
    bound, largest = 0.1, 0.0
    for y in np.linspace(-0.1, 0.1, 21):
        kept = [ridge_update(1.0, y, 0.0, saw, 1, 1.0, bound) for saw in (bound, -bound)]
        later = [ridge_update(1.0, y, alpha, 0.0, 1, 1.0, bound) for alpha in kept]
        largest = max(largest, abs(later[0] - later[1]))
    return [largest / bound]


# ---- Mangold et al. 2022 ----


def dpcd_multiplier(epsilon: float, delta: float, constant: float, releases_counted: float = 1.0) -> float:
    """sqrt(constant * releases * log(1 / delta)) / epsilon over 2: sigma_j in units of the sensitivity 2 L_j / n."""
    return math.sqrt(constant * releases_counted * math.log(1 / delta)) / epsilon / 2


@row
def c1_missing_k() -> list[float]:
    """Epsilon of T K = 100 Gaussians when sigma was chosen for T = 1."""
    delta = 1e-6
    return [dp_accounting.get_epsilon_gaussian(dpcd_multiplier(1.0, delta, 8) / math.sqrt(100), delta)]


@row
def c2_exact_composition() -> list[float]:
    """Up to which epsilon 8 T K is enough, and until where Renyi composition proves 12 T K: rho + 2 sqrt(rho log(1 /
    delta)) <= epsilon; then the exact noise over the printed one, with 8 and with 12.
    """
    delta = 1e-6

    def proven(epsilon: float, constant: float) -> float:
        rho = 1 / (2 * dpcd_multiplier(epsilon, delta, constant) ** 2)
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))

    def real(epsilon: float) -> float:
        return float(dp_accounting.get_epsilon_gaussian(dpcd_multiplier(epsilon, delta, 8), delta))

    assert all(proven(e, 8) > e for e in (0.01, 0.1, 1.0, 10.0))
    limits = [optimize.brentq(lambda e: real(e) - e, 1, 60), optimize.brentq(lambda e: proven(e, 12) - e, 1, 60)]
    ratios = [
        gaussian_multiplier(e, delta) / dpcd_multiplier(e, delta, constant) for constant in (8, 12) for e in (0.1, 1.0)
    ]
    return limits + ratios


@row
def c3_private_constants() -> list[float]:
    """The largest log ratio of p Laplace densities, each moved by its whole sensitivity; and 2 / p."""
    p, epsilon = 50, 1.0
    loss = p * float(stats.laplace.logpdf(2.0, 1.0, 1 / epsilon) - stats.laplace.logpdf(2.0, 0.0, 1 / epsilon))
    return [loss, 2 / p]


# ---- Mangold et al. 2023 ----


def equation_2(epsilon: float, delta: float, steps: int) -> float:
    """The epsilon' with epsilon = sqrt(4 T log(1/delta)) epsilon' + 2 T epsilon' (e^epsilon' - 1)."""
    slope = math.sqrt(4 * steps * math.log(1 / delta))
    return float(optimize.brentq(lambda e: slope * e + 2 * steps * e * math.expm1(e) - epsilon, 1e-9, 5))


def theorem_4_2(epsilon: float, delta: float, steps: int) -> float:
    """The epsilon' of the theorem: epsilon / (4 sqrt(T log(1/delta)))."""
    return epsilon / (4 * math.sqrt(steps * math.log(1 / delta)))


def binary_loss(p: float, q: float) -> Loss:
    """The privacy loss of one bit that is set with probability p or q."""
    logs = [{0: math.log(x), 1: math.log1p(-x)} for x in (p, q)]
    return privacy_loss_distribution.from_two_probability_mass_functions(
        *logs, value_discretization_interval=DISCRETISATION
    )


def with_values(selection: Loss, share: float, steps: int, delta: float) -> float:
    """Epsilon of T selections and T values with Laplace noise of scale sensitivity / share."""
    value = privacy_loss_distribution.from_laplace_mechanism(1 / share, value_discretization_interval=DISCRETISATION)
    return float(selection.self_compose(steps).compose(value.self_compose(steps)).get_epsilon_for_delta(delta))


def group_wins(lead: float, size: int) -> float:
    """The probability that the largest of `size` Laplace variables, plus the lead, exceeds the largest of as many."""
    x = np.linspace(-40, 60, 100_001)
    density = size * stats.laplace.pdf(x) * stats.laplace.cdf(x) ** (size - 1)
    return float(np.sum(density * stats.laplace.cdf(x + lead) ** size) * (x[1] - x[0]))


@row
def g1_noisy_argmax() -> list[float]:
    """One selection: the difference of two Laplace variables exceeds x with probability (1 + x/2) e^-x / 2, and a row
    moves x by 2 epsilon'; the log ratio of two such tails, far out. T of them at eq. (2)'s epsilon': an upper bound
    from randomized response at 2 epsilon', and the best of a few attacks. The upper bound for the theorem's noise.
    """
    share, far, steps, delta = 0.1, 500.0, 100, 1e-6
    tails = [math.log1p(x / 2) - x for x in (far, far + 2 * share)]

    def upper(share: float) -> float:
        wrong = 1 / (1 + math.exp(2 * share))
        return with_values(binary_loss(1 - wrong, wrong), share, steps, delta)

    tuned = equation_2(1.0, delta, steps)
    attacks = [
        with_values(binary_loss(group_wins(lead + tuned, size), group_wins(lead - tuned, size)), tuned, steps, delta)
        for size in (1, 2, 4)
        for lead in (-2.0, 0.0, 2.0)
    ]
    return [(tails[0] - tails[1]) / share, upper(tuned), max(attacks), upper(theorem_4_2(1.0, delta, steps))]


@row
def g2_unequal_noise() -> list[float]:
    """The log ratio over epsilon' of the probabilities that a coordinate of a hundredth of the noise has the largest
    absolute noisy score, the p others being ahead by 1 of their noise scales and all moving by epsilon'; and max over
    levels x of F(x)^p - e^epsilon' F(x - epsilon')^p, F the Laplace distribution.
    """
    p, share, quiet, score = 10, 0.05, 0.01, 20.0
    noise = np.linspace(-30, 30, 60_001) * quiet
    weight = stats.laplace.pdf(noise / quiet)

    def wins(others: float, own: float) -> float:
        mine = np.abs(own + noise)
        return float(np.sum(weight * (stats.laplace.cdf(mine - others) - stats.laplace.cdf(-mine - others)) ** p))

    up = wins(score + 1 - share / 2, score + quiet * share / 2)
    down = wins(score + 1 + share / 2, score - quiet * share / 2)
    x = np.linspace(0, 12, 12_001)
    gap = stats.laplace.cdf(x) ** 1000 - math.exp(0.2) * stats.laplace.cdf(x - 0.2) ** 1000
    return [math.log(up / down) / share, float(gap.max())]


def zcdp_budget(epsilon: float, delta: float) -> float:
    """The largest rho whose conversion gives (epsilon, delta): min over a of a rho + (log(1 / (a delta)) + (a - 1)
    log(1 - 1/a)) / (a - 1) (Canonne, Kamath and Steinke 2020).
    """

    def converted(rho: float) -> float:
        def at(log_order: float) -> float:
            a = 1 + math.exp(log_order)
            return a * rho + (math.log(1 / (a * delta)) + (a - 1) * math.log1p(-1 / a)) / (a - 1)

        return float(optimize.minimize_scalar(at, bounds=(-5, 12), method="bounded").fun)

    return float(optimize.brentq(lambda rho: converted(rho) - epsilon, 1e-9, 10))


@row
def g4_gumbel_and_gaussian() -> list[float]:
    """Standard deviations over the sensitivity D = 2 L / n. Paper: sqrt(2) / epsilon' (Laplace). Right: T e^2 / 8 =
    rho / 2 gives a Gumbel scale 2 D / e = D sqrt(T / rho), T D^2 / (2 sigma^2) = rho / 2 the same for sigma.
    """
    steps, delta = 100, 1e-6
    scale = math.sqrt(steps / zcdp_budget(1.0, delta))
    return [
        right / (math.sqrt(2) / share)
        for share in (theorem_4_2(1.0, delta, steps), equation_2(1.0, delta, steps))
        for right in (math.pi / math.sqrt(6) * scale, scale)
    ]


# ---- Jun and Orabona 2019 ----


def log_moment(u: float, d: int, epsilon: float) -> float:
    """log E exp(u <xi, a>) for noise of density exp(-epsilon |z| / 2) and a unit vector a."""
    return -(d + 1) / 2 * math.log1p(-4 * u * u / epsilon**2)


def test_the_log_moment_itself() -> None:
    """In three dimensions <xi, a> is a Gamma(3) radius times a uniform variable, and E exp(s U) = sinh(s) / s."""
    u, epsilon = 0.3, 1.3
    density = stats.gamma(3, scale=2 / epsilon).pdf
    value = integrate.quad(lambda r: density(r) * math.sinh(u * r) / (u * r) if r else 0.0, 0, 400)[0]
    assert math.log(value) == pytest.approx(log_moment(u, 3, epsilon), rel=1e-6)


@row
def b1_range() -> list[float]:
    """4 / epsilon over the radius epsilon / 2 in which the moment is finite."""
    return [(4 / 1.0) / (1.0 / 2)]


def sub_exponential_variance(d: int, epsilon: float) -> float:
    """The smallest s with log E exp(u <xi, a>) <= u^2 s / 2 for |u| <= epsilon / 4: the ratio grows with u."""
    u = epsilon / 4
    return 2 * log_moment(u, d, epsilon) / u**2


def bet(x: float, y: float, a: float, nodes: Floats, weights: Floats) -> float:
    """The magnitude 1/(2a) int_{-a}^{a} u exp(u x - u^2 y) du, by quadrature around the peak of the integrand."""
    size = abs(x)
    peak, width = size / (2 * y), 12 / math.sqrt(2 * y)
    low, high = max(0.0, min(peak, a) - width), min(a, peak + width)
    u = low + (high - low) * (nodes + 1) / 2
    integrand = u * np.exp(u * size - u * u * y) * -np.expm1(-2 * u * size)
    return math.copysign(float(weights @ integrand) * (high - low) / 2 / (2 * a), x)


def banco(d: int, epsilon: float, count: int, variance: float) -> float:
    """The length of the mean weights of Algorithm 1 on the loss |w - e_1|, G = 1 and a = min(0.6838, epsilon / 4)."""
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((count, d))
    noise *= (rng.gamma(d, 2 / epsilon, count) / np.linalg.norm(noise, axis=1))[:, None]
    nodes, weights = np.polynomial.legendre.leggauss(64)
    target = np.eye(d)[0]
    q, w, total, x, squares = np.zeros(d), np.zeros(d), np.zeros(d), 0.0, 0.0
    for t in range(1, count + 1):
        total += w
        gradient = (target - w) / max(1e-12, math.sqrt((target - w) @ (target - w))) + noise[t - 1]
        x += float(gradient @ q)
        squares += float(gradient @ gradient)
        q = q + math.sqrt(2 / squares) * gradient
        q /= max(1.0, math.sqrt(q @ q))
        w = bet(x, t * (variance / 2 + 1), min(0.6838, epsilon / 4), nodes, weights) * q
    return float(np.linalg.norm(total / count))


def test_the_bet_itself() -> None:
    nodes, weights = np.polynomial.legendre.leggauss(64)
    for x, y in [(30.0, 900.0), (-300.0, 900.0), (2000.0, 900.0)]:
        exact = integrate.quad(lambda u, x=x, y=y: u * math.exp(u * x - u * u * y), -0.25, 0.25, epsabs=0)[0] / 0.5
        assert bet(x, y, 0.25, nodes, weights) == pytest.approx(exact, rel=1e-6)


@row
def b2_variance() -> list[float]:
    """18 d^2 / epsilon^2 over the smallest variance, which is 4.603 (d + 1) / epsilon^2; and two runs."""
    assert sub_exponential_variance(50, 1.0) == pytest.approx(4.603 * 51, rel=1e-4)
    ratios = [18 * d * d / sub_exponential_variance(d, 1.0) for d in (50, 1)]
    return [*ratios, *(banco(20, 1.0, 40_000, variance) for variance in (18 * 20**2, 4.603 * 21))]


# ---- all of them ----


@pytest.mark.parametrize("key", sorted(ROWS))
def test_the_page_shows_what_comes_out(key: str) -> None:
    shown, values = bold_numbers(rows_of(corrections())[key]), ROWS[key]()
    assert len(shown) == len(values), f"{key} shows {len(shown)} numbers, {values} come out"
    for (number, half), value in zip(shown, values):
        assert abs(number - value) <= half * (1 + 1e-9), f"{key} shows {number:g}, {value:g} comes out"
