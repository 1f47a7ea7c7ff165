// Rows of quantized tables. Macros: QUANT = type of the table, Y = type of what is written.
#include "quants.cuh"

constexpr int BLOCK = 256;

// out[i] = table[ids[i]]. Grid: (row, 8 * 256 numbers).
extern "C" __global__ void __launch_bounds__(256)
    get_rows(Y* out, const u8* table, const int* ids, int width, u64 row_nbytes) {
    await_previous();
    const int i = (blockIdx.y * BLOCK + threadIdx.x) * 8;
    if (i >= width) return;
    float y[8];
    dequant8<QUANT>(table + ids[blockIdx.x] * row_nbytes, i, y);
    store8(out + (u64)blockIdx.x * width + i, y);
}
