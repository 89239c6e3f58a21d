// Tiles of AMX, 16 rows of 64 bytes, for the C++ of this package; `native.py` puts it in front of a file.

#include <cstdint>
#include <cstring>
#if defined __AVX2__
#include <immintrin.h>
#endif
#if defined __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef int64_t Long;
typedef uint32_t Word;

static bool has_tiles = false;  // of this file's code: the CPU has them, and the system lets this process use them

// The system saves tiles of a process only after it has asked. `wanted`: a switch for tests and measurements.
static bool ask_for_tiles(bool wanted) {
#if defined __AMX_BF16__
    has_tiles = wanted && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
#else
    (void)wanted;
#endif
    return has_tiles;
}

#if defined __AMX_BF16__
struct alignas(64) TileShapes { uint8_t palette = 1, start = 0, spare[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };

// oneDNN and PyTorch remember which shapes they have set: leave what was there.
struct TileUnit {
    TileShapes before;
    TileUnit() {
        if (!has_tiles) return;
        _tile_storeconfig(&before);
        TileShapes shapes;
        for (int tile = 0; tile < 8; tile++) { shapes.bytes[tile] = 64; shapes.rows[tile] = 16; }
        _tile_loadconfig(&shapes);
    }
    ~TileUnit() {
        if (!has_tiles) return;
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
};

#else
struct TileUnit {
    TileUnit() {}
    ~TileUnit() {}
};
#endif

#if defined __AVX512F__
// 16 x 16 words; rows `from` apart and `into` apart.
static inline void transpose_tile(Word *into, Long to_row, const Word *from, Long from_row) {
    __m512i r[16], s[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_row);
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(into + i * to_row, _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88));
        _mm512_storeu_si512(into + (i + 8) * to_row, _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd));
        _mm512_storeu_si512(into + (i + 4) * to_row, _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88));
        _mm512_storeu_si512(into + (i + 12) * to_row, _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd));
    }
}
#endif
