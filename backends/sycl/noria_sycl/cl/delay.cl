// Keeps the device busy: `n` turns that depend on each other, by one work item.
__kernel void delay(__global uint *sink, ulong n) {
    uint x = 1;
    for (ulong i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
    }
    if (x == 0)  // never: the period of xorshift has no zero, but no compiler knows
        *sink = x;
}
