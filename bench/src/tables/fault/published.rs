//! The times of the published experiment: the kernel's own faults, by the order of the window.

use std::time::Duration;

use uzone_pages::ByteLen;

use super::touch::Pattern;
use uzone_harness::Published;

/// The orders of the windows, as published.
pub(super) const ORDERS: [u8; 7] = [0, 1, 3, 4, 5, 7, 9];
/// The published lengths: in order, and at random.
pub(super) const IN_ORDER: ByteLen = ByteLen::gib(16);
pub(super) const RANDOM: ByteLen = ByteLen::gib(1);

const SHUTEMOV: &str = "Kirill A. Shutemov, fault-around, February 2014: the kernel's own faults on a \
     file of 16 GiB, a machine with 4 sockets; scaled to as many touches as here. \
     The published random rows touch each page often";

/// Seconds by order of the window, for 1, 8, 32, 60 and 120 threads.
type Seconds = [(usize, [f64; 7]); 5];

const IN_ORDER_S: Seconds = [
    (1, [7.25, 6.46, 5.49, 5.49, 5.71, 5.90, 5.11]),
    (8, [16.65, 9.31, 6.61, 6.39, 6.67, 6.75, 6.37]),
    (32, [49.16, 29.71, 12.94, 10.18, 11.84, 9.59, 9.93]),
    (60, [86.26, 49.63, 22.34, 17.61, 16.52, 16.34, 16.33]),
    (120, [124.59, 79.76, 39.51, 32.17, 29.97, 28.73, 28.04]),
];
const RANDOM_S: Seconds = [
    (1, [15.35, 16.61, 16.57, 15.18, 16.56, 16.58, 15.37]),
    (8, [15.04, 15.10, 14.47, 14.29, 14.41, 14.30, 14.40]),
    (32, [20.43, 21.59, 22.12, 14.87, 14.88, 14.88, 14.82]),
    (60, [26.58, 25.69, 18.73, 20.15, 21.62, 17.75, 17.61]),
    (120, [41.84, 40.46, 36.09, 35.31, 35.81, 36.55, 34.29]),
];
// In the original, the time of 8 threads and two pages repeats the time of 32 threads.
const SPARSE_S: Seconds = [
    (1, [0.0399, 0.0454, 0.0518, 0.0637, 0.0791, 0.1765, 0.5412]),
    (8, [0.124, 0.489, 0.157, 0.192, 0.243, 0.544, 1.677]),
    (32, [0.452, 0.489, 0.565, 0.648, 0.790, 1.652, 5.000]),
    (60, [0.763, 0.870, 0.981, 1.162, 1.467, 3.040, 9.309]),
    (120, [1.596, 1.668, 2.009, 2.425, 2.941, 5.978, 18.40]),
];

/// Returns the published time of the kernel, scaled to `len`.
pub(super) fn published(
    pattern: Pattern,
    threads: usize,
    order: u8,
    len: ByteLen,
) -> Option<Published> {
    let (seconds, of) = match pattern {
        Pattern::InOrder => (IN_ORDER_S, IN_ORDER),
        Pattern::Random => (RANDOM_S, RANDOM),
        Pattern::OnePerTable => (SPARSE_S, IN_ORDER),
    };
    let (_, seconds) = seconds.into_iter().find(|(known, _)| *known == threads)?;
    let index = ORDERS.iter().position(|known| *known == order)?;
    let ns = uzone_report::nanoseconds(Duration::from_secs_f64(seconds[index]));
    Some(Published::scaled(ns, len.get(), of.get(), SHUTEMOV)).filter(|published| published.ns > 0)
}
