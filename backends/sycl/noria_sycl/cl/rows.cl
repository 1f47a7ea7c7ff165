// Rows of quantized tables. Macro: QUANT = type of the table.
#include "quants.h"

// out[i] = table[ids[i]], 32 numbers an item. Items: (numbers / 32, rows).
__kernel void get_rows(__global float *out, u64 out_at, __global const u8 *table, u64 table_at, __global const int *ids,
                       u64 ids_at, int width, u64 row_nbytes) {
    const int i = get_global_id(0) * 32, r = get_global_id(1);
    if (i >= width) return;
    float8 y[4];
    JOIN(QUANT, _values)(AT(const u8, table) + AT(const int, ids)[r] * row_nbytes, i, y);
    __global float *to = AT(float, out) + (u64)r * width + i;
    for (int k = 0; k < 4; k++) STORE8_GLOBAL(to + 8 * k, y[k]);
}
