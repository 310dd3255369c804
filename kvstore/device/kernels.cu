// The kernels of kvstore: plain CUDA C++, compiled by NVRTC for a GPU and by g++ with shim/cuda_on_cpu.hpp for a CPU.
//
// One source, the same bytes on both: no header is included, 16-bit floats are converted by the functions below, every
// multiplication, addition and division of floats is rounded by itself (__fmul_rn and the like are never contracted),
// and the order of every sum is written down. No inline PTX, no asynchronous copies, no tensor cores. Names, parameters
// and launch shapes are in kernels.py, which a test compares with this file.

typedef unsigned long long Address;
typedef long long Bytes;

#ifndef KV_DYNAMIC_SHARED
#define KV_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

// Values of 16 bits --------------------------------------------------------------------------------------------------

struct Half {
  unsigned short bits;
};

struct BFloat {
  unsigned short bits;
};

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(BFloat value) { return __uint_as_float((unsigned int)value.bits << 16); }

__device__ inline float to_float(Half value) {
  const unsigned int sign = (unsigned int)(value.bits & 0x8000u) << 16;
  const unsigned int magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero or subnormal: a whole number of 2^-24
    return __uint_as_float(__float_as_uint(__fmul_rn((float)magnitude, 5.9604644775390625e-08f)) | sign);
  }
  const unsigned int bias = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;
  return __uint_as_float(((magnitude << 13) + bias) | sign);
}

__device__ inline void from_float(float value, float& result) { result = value; }

// To nearest, ties to even; a NaN becomes the quiet one of its sign.
__device__ inline void from_float(float value, BFloat& result) {
  const unsigned int bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    result.bits = (unsigned short)((bits >> 16 & 0x8000u) | 0x7fc0u);
  } else {
    result.bits = (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

__device__ inline void from_float(float value, Half& result) {
  const unsigned int bits = __float_as_uint(value);
  const unsigned int sign = bits >> 16 & 0x8000u;
  unsigned int magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    magnitude = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    magnitude = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: one half has the unit in the last place that is wanted, 2^-24
    magnitude = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
  } else {
    magnitude = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  }
  result.bits = (unsigned short)(sign | magnitude);
}

// Copies between layouts ---------------------------------------------------------------------------------------------

// Pieces are what a group of `lanes` neighbouring threads moves at once, one access each. A group takes PIECES_AT_ONCE
// of them in a row and loads all before it stores any, so that a few blocks keep a link of long latency busy. Loads and
// stores are marked as used once. A Cursor says where pieces lie: it is put on one, and goes to the next without a division.
#define PIECES_AT_ONCE 4

template <typename Access, typename Cursor>
__device__ inline void copy_pieces(Cursor cursor, unsigned int n_pieces, unsigned int lanes) {
  const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned int lane_bytes = (thread & (lanes - 1)) * (unsigned int)sizeof(Access);
  const unsigned int step = gridDim.x * blockDim.x / lanes * PIECES_AT_ONCE;
  for (unsigned int first = thread / lanes * PIECES_AT_ONCE; first < n_pieces; first += step) {
    Access held[PIECES_AT_ONCE];
    Access* to[PIECES_AT_ONCE];
    cursor.seek(first);
#pragma unroll
    for (unsigned int i = 0; i < PIECES_AT_ONCE; ++i) {
      to[i] = nullptr;
      if (first + i < n_pieces) {
        const Bytes inside = cursor.inside() + lane_bytes;
        if (inside < cursor.size_bytes()) {
          to[i] = (Access*)(cursor.to() + inside);
          held[i] = __ldcs((const Access*)(cursor.come_from() + inside));
        }
        cursor.next();
      }
    }
#pragma unroll
    for (unsigned int i = 0; i < PIECES_AT_ONCE; ++i) {
      if (to[i] != nullptr) __stcs(to[i], held[i]);
    }
  }
}

template <typename Cursor>
__device__ inline void copy_by(const Cursor& cursor, unsigned int n_pieces, unsigned int lanes,
                               unsigned int access_bytes) {
  switch (access_bytes) {
    case 16: copy_pieces<uint4>(cursor, n_pieces, lanes); break;
    case 8: copy_pieces<uint2>(cursor, n_pieces, lanes); break;
    case 4: copy_pieces<unsigned int>(cursor, n_pieces, lanes); break;
    case 2: copy_pieces<unsigned short>(cursor, n_pieces, lanes); break;
    default: copy_pieces<unsigned char>(cursor, n_pieces, lanes); break;
  }
}

struct RunCursor {
  const Address* to_planes;
  const Address* from_planes;
  const Bytes* to_offsets;
  const Bytes* from_offsets;
  const Address* sizes_bytes;
  unsigned int n_runs, pieces_of_run, piece_bytes;
  unsigned int plane, run, piece;

  __device__ void seek(unsigned int index) {
    piece = index % pieces_of_run;
    index /= pieces_of_run;
    run = index % n_runs;
    plane = index / n_runs;
  }
  __device__ void next() {
    if (++piece < pieces_of_run) return;
    piece = 0;
    if (++run < n_runs) return;
    run = 0;
    ++plane;
  }
  __device__ Bytes inside() const { return (Bytes)piece * piece_bytes; }
  __device__ Bytes size_bytes() const { return (Bytes)sizes_bytes[run]; }
  __device__ Address to() const { return to_planes[plane] + (Address)to_offsets[run]; }
  __device__ Address come_from() const { return from_planes[plane] + (Address)from_offsets[run]; }
};

// Runs of bytes by a table, the same for every plane: offsets from the plane's address on both sides.
extern "C" __global__ void __launch_bounds__(1024)
    kv_copy_runs(const Address* to_planes, const Address* from_planes, const Bytes* to_offsets,
                 const Bytes* from_offsets, const Address* sizes_bytes, unsigned int n_planes, unsigned int n_runs,
                 unsigned int pieces_of_run, unsigned int lanes, unsigned int access_bytes) {
  const RunCursor cursor = {to_planes, from_planes,   to_offsets,           from_offsets, sizes_bytes,
                            n_runs,    pieces_of_run, lanes * access_bytes, 0,            0, 0};
  copy_by(cursor, n_planes * n_runs * pieces_of_run, lanes, access_bytes);
}

// One side of a copy by calculation: token t lies in page (t + first_token) / page_tokens of every plane.
struct Side {
  const Address* planes;
  const Bytes* starts;
  Bytes token_bytes, head_bytes;
  unsigned int page_tokens, first_token;
  unsigned int page, token;

  __device__ void seek(unsigned int index) {
    page = (index + first_token) / page_tokens;
    token = (index + first_token) % page_tokens;
  }
  __device__ void next() {
    if (++token < page_tokens) return;
    token = 0;
    ++page;
  }
  __device__ Address at(unsigned int plane, unsigned int head) const {
    return planes[plane] + (Address)(starts[page] + token * token_bytes + head * head_bytes);
  }
};

struct PageCursor {
  Side to_side, from_side;
  unsigned int n_tokens, heads, unit_bytes, pieces_of_unit, piece_bytes;
  unsigned int plane, token, head, piece;

  __device__ void seek(unsigned int index) {
    piece = index % pieces_of_unit;
    index /= pieces_of_unit;
    head = index % heads;
    index /= heads;
    token = index % n_tokens;
    plane = index / n_tokens;
    to_side.seek(token);
    from_side.seek(token);
  }
  __device__ void next() {
    if (++piece < pieces_of_unit) return;
    piece = 0;
    if (++head < heads) return;
    head = 0;
    if (++token < n_tokens) {
      to_side.next();
      from_side.next();
      return;
    }
    token = 0;
    ++plane;
    to_side.seek(0);
    from_side.seek(0);
  }
  __device__ Bytes inside() const { return (Bytes)piece * piece_bytes; }
  __device__ Bytes size_bytes() const { return unit_bytes; }
  __device__ Address to() const { return to_side.at(plane, head); }
  __device__ Address come_from() const { return from_side.at(plane, head); }
};

// The units of all tokens and heads, from any paged layout to any other, without a table of runs.
extern "C" __global__ void __launch_bounds__(1024)
    kv_copy_pages(const Address* to_planes, const Bytes* to_starts, Bytes to_token_bytes, Bytes to_head_bytes,
                  unsigned int to_page_tokens, unsigned int to_first_token, const Address* from_planes,
                  const Bytes* from_starts, Bytes from_token_bytes, Bytes from_head_bytes,
                  unsigned int from_page_tokens, unsigned int from_first_token, unsigned int n_planes,
                  unsigned int n_tokens, unsigned int heads, unsigned int unit_bytes, unsigned int pieces_of_unit,
                  unsigned int lanes, unsigned int access_bytes) {
  const Side to_side = {to_planes, to_starts, to_token_bytes, to_head_bytes, to_page_tokens, to_first_token, 0, 0};
  const Side from_side = {from_planes,      from_starts,      from_token_bytes, from_head_bytes,
                          from_page_tokens, from_first_token, 0,                0};
  const PageCursor cursor = {to_side, from_side, n_tokens, heads, unit_bytes, pieces_of_unit, lanes * access_bytes,
                             0,       0,         0,        0};
  copy_by(cursor, n_planes * n_tokens * heads * pieces_of_unit, lanes, access_bytes);
}

// Summaries of pages -------------------------------------------------------------------------------------------------

// N neighbouring channels of a row, in one access.
template <typename Value, int N>
struct Channels;

template <typename Value>
struct Channels<Value, 1> {
  Value each[1];
  __device__ void load(Address from) { each[0] = *(const Value*)from; }
  __device__ void store(Value* to) const { *to = each[0]; }
};

template <typename Value, int N>
struct Channels {
  union {
    uint4 whole;
    Value each[N];
  };
  __device__ void load(Address from) { whole = __ldcs((const uint4*)from); }
  __device__ void store(Value* to) const { *(uint4*)to = whole; }
};

// Smallest, largest and mean of every channel over the rows of a page, one head; one thread for N channels. The mean is
// summed row by row in float, divided once, rounded once. What is compared with a NaN wins; a mean with one is NaN.
template <typename Value, int N>
__device__ inline void summarize(const Address* pages, const unsigned int* rows, Bytes token_bytes, Bytes head_bytes,
                                 Value* low, Value* high, Value* mean, unsigned int n_pages, unsigned int heads,
                                 unsigned int head_dim) {
  const unsigned int n_items = n_pages * heads * (head_dim / N);
  for (unsigned int item = blockIdx.x * blockDim.x + threadIdx.x; item < n_items; item += gridDim.x * blockDim.x) {
    const unsigned int channel = item % (head_dim / N) * N;
    const unsigned int head = item / (head_dim / N) % heads;
    const unsigned int page = item / (head_dim / N) / heads;
    const unsigned int n_rows = rows[page];
    if (n_rows == 0) continue;
    const Address first = pages[page] + (Address)(head * head_bytes) + channel * sizeof(Value);
    float smallest[N], largest[N], sum[N];
    Channels<Value, N> row;
    row.load(first);
#pragma unroll
    for (int i = 0; i < N; ++i) smallest[i] = largest[i] = sum[i] = to_float(row.each[i]);
    for (unsigned int r = 1; r < n_rows; ++r) {
      row.load(first + (Address)(r * token_bytes));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float value = to_float(row.each[i]);
        if (value < smallest[i] || smallest[i] != smallest[i]) smallest[i] = value;
        if (value > largest[i] || largest[i] != largest[i]) largest[i] = value;
        sum[i] = __fadd_rn(sum[i], value);
      }
    }
    const Address at = ((Address)page * heads + head) * head_dim + channel;
    if (low != nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) from_float(smallest[i], row.each[i]);
      row.store(low + at);
    }
    if (high != nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) from_float(largest[i], row.each[i]);
      row.store(high + at);
    }
    if (mean != nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) from_float(__fdiv_rn(sum[i], (float)n_rows), row.each[i]);
      row.store(mean + at);
    }
  }
}

#define KV_PAGE_SUMMARY(suffix, Value)                                                                              \
  extern "C" __global__ void __launch_bounds__(256) kv_page_summary_##suffix(                                       \
      const Address* pages, const unsigned int* rows, Bytes token_bytes, Bytes head_bytes, Value* low, Value* high, \
      Value* mean, unsigned int n_pages, unsigned int heads, unsigned int head_dim, unsigned int channels_at_once) { \
    if (channels_at_once == 1) {                                                                                    \
      summarize<Value, 1>(pages, rows, token_bytes, head_bytes, low, high, mean, n_pages, heads, head_dim);         \
    } else {                                                                                                        \
      summarize<Value, 16 / sizeof(Value)>(pages, rows, token_bytes, head_bytes, low, high, mean, n_pages, heads,   \
                                           head_dim);                                                               \
    }                                                                                                               \
  }

KV_PAGE_SUMMARY(float16, Half)
KV_PAGE_SUMMARY(bfloat16, BFloat)
KV_PAGE_SUMMARY(float32, float)

// Scores of pages ----------------------------------------------------------------------------------------------------

// The most that a key of a page can give for each query of a kv head: sum over channels of max(q * low, q * high)
// (Quest); low = high = the mean gives the score of a landmark. One warp for a page, one row of blocks for a kv head.
// Lane l sums channels l, l + 32, ... in order; lanes are added in pairs 16, 8, 4, 2, 1 apart; queries of the head are
// joined in order, by their sum or by the largest. Queries are held as float, `tile` of them at a time.
template <typename Value>
__device__ inline void score(const Value* queries, const Value* low, const Value* high, float* scores,
                             unsigned int n_pages, unsigned int group, unsigned int head_dim, unsigned int tile,
                             unsigned int add) {
  KV_DYNAMIC_SHARED(float, held);
  const unsigned int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned int head = blockIdx.y, heads = gridDim.y;
  const Value* mine = queries + (Address)head * group * head_dim;
  for (unsigned int page_of_block = blockIdx.x * warps; page_of_block < n_pages; page_of_block += gridDim.x * warps) {
    const unsigned int page = page_of_block + warp;
    const Address at = ((Address)page * heads + head) * head_dim;
    float result = 0.0f;
    for (unsigned int first = 0; first < group; first += tile) {
      const unsigned int n_queries = group - first < tile ? group - first : tile;
      if (tile < group || page_of_block == blockIdx.x * warps) {
        __syncthreads();  // all are done with the queries before
        for (unsigned int i = threadIdx.x; i < n_queries * head_dim; i += blockDim.x) {
          held[i] = to_float(mine[first * head_dim + i]);
        }
        __syncthreads();  // all of the tile is there
      }
      if (page < n_pages) {
        for (unsigned int q = 0; q < n_queries; ++q) {
          float sum = 0.0f;
          for (unsigned int channel = lane; channel < head_dim; channel += 32) {
            const float query = held[q * head_dim + channel];
            const float by_low = __fmul_rn(query, to_float(low[at + channel]));
            const float by_high = __fmul_rn(query, to_float(high[at + channel]));
            sum = __fadd_rn(sum, by_low > by_high ? by_low : by_high);
          }
          for (unsigned int apart = 16; apart > 0; apart /= 2) {
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, apart));
          }
          if (first + q == 0) {
            result = sum;
          } else if (add) {
            result = __fadd_rn(result, sum);
          } else if (sum > result) {
            result = sum;
          }
        }
      }
    }
    if (page < n_pages && lane == 0) scores[(Address)head * n_pages + page] = result;
  }
}

#define KV_PAGE_SCORE(suffix, Value)                                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      kv_page_score_##suffix(const Value* queries, const Value* low, const Value* high, float* scores,                \
                             unsigned int n_pages, unsigned int group, unsigned int head_dim, unsigned int tile,      \
                             unsigned int add) {                                                                      \
    score<Value>(queries, low, high, scores, n_pages, group, head_dim, tile, add);                                    \
  }

KV_PAGE_SCORE(float16, Half)
KV_PAGE_SCORE(bfloat16, BFloat)
KV_PAGE_SCORE(float32, float)
