#include "common.cuh"

// Keeps a stream busy for about `duration_ns`.
extern "C" __global__ void delay(u64 duration_ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < duration_ns);
}
