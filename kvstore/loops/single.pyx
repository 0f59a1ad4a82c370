# cython: language_level=3, wraparound=False, initializedcheck=False, boundscheck=False
"""Single rows of a table: keys of values of Python, and rows as dicts.

`kvstore.codec.tuples` has the bytes of keys, and `kvstore.loops.rows` the bytes of rows.

Invariants
1. A dict has the values that a batch of `decode_keys` and `decode_rows` has in the same row.
2. Bytes that are no key or no row of the table raise `CorruptionError`.
3. No byte is read behind the end of a stored key or of a stored row.
4. Fields change in the constructor alone, because reads call functions of Python.
"""

cimport cython

include "shared.pxi"
include "parts.pxi"
include "instants.pxi"
include "key_parts.pxi"

from cpython.dict cimport PyDict_Copy, PyDict_SetItem
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8

from kvstore.errors import CorruptionError

cdef int CALLED = _contract.CALLED, STORED = _contract.STORED, TEXT = _contract.TEXT
cdef enum:
    TURN = 1024                 # rows between two calls of `let_others_run`
cdef object let_others_run = _contract.let_others_run
cdef bytes FLIP = bytes(range(255, -1, -1))
cdef int TRUTH = _contract.TRUTH, INSTANT = _contract.INSTANT, LOCAL = _contract.LOCAL


cdef struct Cell:
    int way                     # of a column of a row
    unsigned char letter
    Py_ssize_t index, place, width


@cython.final
cdef class KeyMaker:
    """Makes keys that begin with a prefix."""
    cdef bytes prefix
    cdef list makers
    cdef Part *parts

    def __cinit__(self, bytes prefix not None, columns):
        cdef Py_ssize_t at
        self.prefix = prefix
        self.makers = []
        self.parts = <Part *>malloc(max(len(columns), 1) * sizeof(Part))
        if self.parts is NULL:
            raise MemoryError
        for at, (kind, tag, is_flipped, way, least, most, maker) in enumerate(columns):
            self.parts[at].kind, self.parts[at].tag, self.parts[at].way = kind, tag, way
            self.parts[at].mask = 255 if is_flipped else 0
            self.parts[at].least, self.parts[at].most = least, most
            self.makers.append(maker)

    def __dealloc__(self):
        free(self.parts)

    def make(self, values):
        """The key of `values`, of the columns from the first on. Raises `ValueError` for a value
        that its column does not take."""
        return self._make(tuple(values))

    def fits(self, entries, rows, names):
        """Whether each entry of an index fits its row: the entry begins with the key of the row's
        values in the columns `names`. No entry fits None."""
        cdef list asked = list(entries), found = list(rows), columns = list(names), fitting = []
        cdef Py_ssize_t at
        cdef bytes entry, made
        if PyList_GET_SIZE(asked) != PyList_GET_SIZE(found):
            raise ValueError("entries and rows differ in number")
        for at in range(PyList_GET_SIZE(asked)):
            row = <object>PyList_GET_ITEM(found, at)
            if row is None:
                fitting.append(False)
                continue
            entry = <bytes?>(<object>PyList_GET_ITEM(asked, at))
            made = self._make(tuple([(<dict?>row)[name] for name in columns]))
            fitting.append(entry.startswith(made))
        return fitting

    cdef bytes _make(self, tuple given):
        cdef Py_ssize_t at, begin, count = PyTuple_GET_SIZE(given)
        cdef Text text
        if count > PyList_GET_SIZE(self.makers):
            raise ValueError("a key has too many values")
        text.size, text.room = 0, PyBytes_GET_SIZE(self.prefix) + 24 * count + 8
        text.data = <unsigned char *>malloc(text.room)
        if text.data is NULL:
            raise MemoryError
        try:
            add(&text, PyBytes_AS_STRING(self.prefix), PyBytes_GET_SIZE(self.prefix))
            for at in range(count):
                value = <object>PyTuple_GET_ITEM(given, at)
                begin = text.size
                if not add_element(&text, &self.parts[at], value):
                    made = <bytes?>(<object>PyList_GET_ITEM(self.makers, at))(value)
                    add(&text, PyBytes_AS_STRING(made), PyBytes_GET_SIZE(made))
                elif self.parts[at].mask:
                    for begin in range(begin, text.size):
                        text.data[begin] ^= 255
            return PyBytes_FromStringAndSize(<char *>text.data, text.size)
        finally:
            free(text.data)


cdef inline int add(Text *text, const char *data, Py_ssize_t size) except -1:
    reserve(text, size)
    memcpy(text.data + text.size, data, size)
    text.size += size
    return 0


cdef bint add_element(Text *text, Part *part, value) except -1:
    """Add the element of a value, not flipped; False where the column's own function makes it."""
    cdef int overflow = 0
    cdef int64_t number
    cdef uint64_t bits
    cdef double real
    cdef const char *data
    cdef Py_ssize_t size
    if part.way == STORED:
        if type(value) is int and (part.kind == SIGNED or part.kind == UNSIGNED):
            number = PyLong_AsLongLongAndOverflow(value, &overflow)
            if overflow or not part.least <= number <= part.most:
                return False
            return add_number(text, part.tag, <uint64_t>number ^ SIGN)
        if type(value) is float and part.kind == DOUBLE:
            real = value
            memcpy(&bits, &real, 8)
            return add_number(text, part.tag, ordered_double(bits))
        if type(value) is bytes and part.kind == FRAMED:
            return add_framed(
                text, part.tag, PyBytes_AS_STRING(<bytes>value), PyBytes_GET_SIZE(<bytes>value)
            )
        return False
    if part.way == TEXT and type(value) is str:
        data = PyUnicode_AsUTF8AndSize(value, &size)  # raises UnicodeEncodeError, a ValueError
        return add_framed(text, part.tag, data, size)
    if part.way == INSTANT and micros_of(value, &number):
        return add_number(text, part.tag, <uint64_t>number ^ SIGN)
    return False


cdef bint add_number(Text *text, unsigned char tag, uint64_t number) except -1:
    reserve(text, 9)
    text.data[text.size] = tag
    put_big(text.data + text.size + 1, number)
    text.size += 9
    return True


cdef bint add_framed(Text *text, unsigned char tag, const char *data, Py_ssize_t size) except -1:
    cdef Py_ssize_t at
    cdef unsigned char *out
    reserve(text, 2 * size + 3)
    out = text.data + text.size
    out[0] = tag
    out += 1
    if size and memchr(data, 0, size) is not NULL:
        for at in range(size):
            out[0] = <unsigned char>data[at]
            out += 1
            if not data[at]:
                out[0] = 255
                out += 1
    else:
        memcpy(out, data, size)
        out += size
    out[0], out[1] = TERMINATOR_0, TERMINATOR_1
    text.size = out + 2 - text.data
    return True


@cython.final
cdef class RowDicts:
    """Reads the rows of one schema number as dicts.

    A dict is a copy of `template`, with the columns of `keys` and `cells`. Keys begin with
    `prefix`. `widths` has the width of each column of a row, 0 where it varies.
    """
    cdef str where
    cdef dict template
    cdef list key_names, key_calls, cell_names, cell_calls
    cdef Py_ssize_t skip, many, fixed, varying
    cdef unsigned char low, high        # of the schema number
    cdef bint reads_key
    cdef Part *parts
    cdef Cell *cells

    def __cinit__(self, str where not None, dict template not None, bytes prefix not None, keys,
                  int number, widths, cells):
        cdef Py_ssize_t at, index
        cdef list places = []
        self.where, self.template = where, template.copy()
        self.skip = PyBytes_GET_SIZE(prefix)
        self.low, self.high = number & 255, number >> 8
        self.key_names, self.key_calls, self.cell_names, self.cell_calls = [], [], [], []
        self.parts = <Part *>malloc(max(len(keys), 1) * sizeof(Part))
        self.cells = <Cell *>malloc(max(len(cells), 1) * sizeof(Cell))
        if self.parts is NULL or self.cells is NULL:
            raise MemoryError
        for at, (name, kind, tag, is_flipped, width, way, call) in enumerate(keys):
            set_part(&self.parts[at], kind, tag, is_flipped, width)
            self.parts[at].way, self.parts[at].is_wanted = way, name is not None
            self.reads_key = self.reads_key or name is not None
            self.key_names.append(name)
            self.key_calls.append(call)
        for width in widths:
            places.append(self.fixed if width else self.varying)
            self.fixed += width
            self.varying += width == 0
        self.many = len(widths)
        for at, (name, index, letter, way, call) in enumerate(cells):
            if not 0 <= index < self.many:
                raise ValueError("a row has no such column")
            self.cells[at].index, self.cells[at].place = index, places[index]
            self.cells[at].width, self.cells[at].way = widths[index], way
            self.cells[at].letter = <unsigned char>ord(letter)
            require_letter(&self.cells[at])
            self.cell_names.append(name)
            self.cell_calls.append(call)

    def __dealloc__(self):
        free(self.parts)
        free(self.cells)

    def read(self, bytes key not None, bytes value not None):
        """The row of a key and a value; None where the value has another schema number."""
        return self._read(key, value)

    def read_all(self, keys, values, otherwise):
        """The rows of keys and values. A value that is None gives None. `otherwise` reads a row
        with another schema number."""
        cdef list asked = list(keys), stored = list(values), rows = []
        cdef Py_ssize_t at
        if PyList_GET_SIZE(asked) != PyList_GET_SIZE(stored):
            raise ValueError("keys and values differ in number")
        for at in range(PyList_GET_SIZE(asked)):
            if at % TURN == TURN - 1:
                let_others_run()
            value = <object>PyList_GET_ITEM(stored, at)
            row = None
            if value is not None:
                key = <bytes?>(<object>PyList_GET_ITEM(asked, at))
                row = self._read(key, <bytes?>value)
                if row is None:
                    row = otherwise(key, value)
            rows.append(row)
        return rows

    cdef object _read(self, bytes key, bytes value):
        cdef const unsigned char *row = <const unsigned char *>PyBytes_AS_STRING(value)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(value), at, start, end, tail
        cdef Py_ssize_t body = HEAD + (self.many + 7) // 8
        cdef int width
        cdef Cell *cell
        if size < HEAD or row[0] >> 4 != FORMAT or row[1] != self.low or row[2] != self.high:
            return None
        cdef dict found = PyDict_Copy(self.template)
        if self.reads_key:
            self._read_key(key, found)
        width = row[0] & 15
        if width != 1 and width != 2 and width != 4:
            raise CorruptionError(f"a row of {self.where}", f"its head is {value[:HEAD].hex()}")
        tail = body + self.fixed + self.varying * width
        end = 0
        if self.varying and tail <= size:
            end = get_little(row + tail - width, width)
        if tail + end != size:
            self._refuse(size)
        for at in range(PyList_GET_SIZE(self.cell_names)):
            cell = &self.cells[at]
            call = <object>PyList_GET_ITEM(self.cell_calls, at)
            start = end = 0
            if not cell.width:
                if cell.place:
                    start = get_little(row + body + self.fixed + (cell.place - 1) * width, width)
                end = get_little(row + body + self.fixed + cell.place * width, width)
                if start > end or tail + end > size:
                    raise CorruptionError(f"a row of {self.where}", "its offsets do not ascend")
            if row[HEAD + (cell.index >> 3)] >> (cell.index & 7) & 1:
                made = None
            elif cell.width:
                made = fixed_value(cell, row + body + cell.place, call)
            else:
                try:
                    made = bytes_value(cell.way, <const char *>row + tail + start, end - start, call)
                except UnicodeDecodeError as error:
                    raise CorruptionError(f"a row of {self.where}", f"no UTF-8: {error}") from None
            PyDict_SetItem(found, <object>PyList_GET_ITEM(self.cell_names, at), made)
        return found

    cdef int _refuse(self, Py_ssize_t size) except -1:
        raise CorruptionError(
            f"a row of {self.where}", f"its {size} bytes do not fit its schema"
        )

    cdef int _read_key(self, bytes key, dict found) except -1:
        cdef const unsigned char *data = <const unsigned char *>PyBytes_AS_STRING(key)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(key), here = self.skip, end, at
        cdef Part *part
        try:
            for at in range(PyList_GET_SIZE(self.key_names)):
                part = &self.parts[at]
                end = element_end(part, data, here, size)
                if end < 0 or data[here] ^ part.mask == NULL_TAG:
                    here = -1
                    break
                if part.is_wanted:
                    call = <object>PyList_GET_ITEM(self.key_calls, at)
                    made = element_value(part, data, here, end, call)
                    PyDict_SetItem(found, <object>PyList_GET_ITEM(self.key_names, at), made)
                here = end
        except (ValueError, OverflowError):
            here = -1
        if here != size:
            raise CorruptionError(f"{self.where}, key {key.hex()}", "no key of its table")
        return 0


cdef int require_letter(Cell *cell) except -1:
    cdef Py_ssize_t width = cell.width
    if cell.letter == b"s" or (
        width == 1 and cell.letter in b"bB"
        or width == 2 and cell.letter in b"hH"
        or width == 4 and cell.letter in b"iIf"
        or width == 8 and cell.letter in b"qQd"
    ):
        return 0
    raise ValueError("a letter does not go with the width of its column")


cdef fixed_value(Cell *cell, const unsigned char *data, call):
    cdef uint64_t bits = 0
    cdef float single
    cdef double real
    cdef int64_t number
    if cell.letter == b"s":
        return bytes_value(cell.way, <const char *>data, cell.width, call)
    if cell.letter == b"d":
        memcpy(&real, data, 8)
        return of_object(cell.way, real, call)
    if cell.letter == b"f":
        memcpy(&single, data, 4)
        return of_object(cell.way, <double>single, call)
    memcpy(&bits, data, cell.width)  # the machine is little-endian, as Arrow is
    if cell.letter == b"Q":
        return of_object(cell.way, bits, call)
    number = <int64_t>bits
    if cell.letter == b"b":
        number = <signed char>bits
    elif cell.letter == b"h":
        number = <short>bits
    elif cell.letter == b"i":
        number = <int>bits
    return of_number(cell.way, number, call)


cdef inline of_object(int way, value, call):
    return value if way == STORED else call(value)


cdef of_number(int way, int64_t number, call):
    if way == STORED:
        return number
    if way == TRUTH:
        return number != 0
    if (way == INSTANT or way == LOCAL) and is_instant(number):
        return instant_of(number, way == INSTANT)
    return call(number)


cdef bytes_value(int way, const char *data, Py_ssize_t size, call):
    if way == TEXT:
        return PyUnicode_DecodeUTF8(data, size, NULL)
    return of_object(way, PyBytes_FromStringAndSize(data, size), call)


cdef element_value(Part *part, const unsigned char *data, Py_ssize_t here, Py_ssize_t end, call):
    """The value of the element from `here` to `end`, which `element_end` has checked."""
    cdef unsigned char tag = data[here] ^ part.mask
    cdef uint64_t number
    cdef double real
    cdef bytes cell
    if part.kind == BOOLEAN:
        return of_number(part.way, tag == TRUE_TAG, call)
    here += 1
    if part.kind == FRAMED:
        end -= 2
        if not part.mask and (
            here == end or memchr(data + here, 0, end - here) is NULL
        ):
            return bytes_value(part.way, <const char *>data + here, end - here, call)
        cell = unframed(data, here, end, part.mask)
        return bytes_value(part.way, PyBytes_AS_STRING(cell), PyBytes_GET_SIZE(cell), call)
    if part.kind == FIXED or part.kind == WHOLE:
        cell = data[here:end]
        if part.mask:
            cell = cell.translate(FLIP)
        return of_object(part.way, cell, call)
    number = big_endian(data + here)
    if part.mask:
        number = ~number
    if part.kind == DOUBLE:
        number = number ^ SIGN if number & SIGN else ~number
        memcpy(&real, &number, 8)
        return of_object(part.way, real, call)
    if tag == UNSIGNED_TAG:
        return of_object(part.way, number, call)
    return of_number(part.way, <int64_t>(number ^ SIGN), call)


def row_keys(entries, Py_ssize_t skip, columns, bytes prefix not None, str where not None):
    """The keys of the rows to which entries of an index lead. An entry has the columns of the
    index, as in `decode_keys`, behind `skip` bytes, and the columns of the row's key behind them. A
    row's key begins with `prefix`. Raises `CorruptionError` for bytes that are no entry."""
    cdef list asked = list(entries), found = []
    cdef Py_ssize_t at, place, here, many = len(columns), size
    cdef const unsigned char *data
    cdef bytes entry, key
    cdef Part *parts = <Part *>malloc(max(many, 1) * sizeof(Part))
    if parts is NULL:
        raise MemoryError
    try:
        for place, (kind, tag, is_flipped, width) in enumerate(columns):
            set_part(&parts[place], kind, tag, is_flipped, width)
        for at in range(PyList_GET_SIZE(asked)):
            entry = <bytes?>(<object>PyList_GET_ITEM(asked, at))
            data, size = <const unsigned char *>PyBytes_AS_STRING(entry), PyBytes_GET_SIZE(entry)
            here = skip
            for place in range(many):
                here = element_end(&parts[place], data, here, size)
                if here < 0:
                    raise CorruptionError(
                        f"{where}, key {entry.hex()}",
                        f"no key of its table: column {place} does not fit",
                    )
            if here > size:
                raise CorruptionError(f"{where}, key {entry.hex()}", "no key of its table")
            key = PyBytes_FromStringAndSize(NULL, PyBytes_GET_SIZE(prefix) + size - here)
            memcpy(PyBytes_AS_STRING(key), PyBytes_AS_STRING(prefix), PyBytes_GET_SIZE(prefix))
            memcpy(PyBytes_AS_STRING(key) + PyBytes_GET_SIZE(prefix), data + here, size - here)
            found.append(key)
        return found
    finally:
        free(parts)
