# Included by single: datetimes of Python as microseconds since the epoch, and back. The calendar
# follows Howard Hinnant, "chrono-compatible low-level date algorithms".

from cpython.datetime cimport (
    PyDateTime_CheckExact,
    datetime_day,
    datetime_hour,
    datetime_microsecond,
    datetime_minute,
    datetime_month,
    datetime_new,
    datetime_second,
    datetime_tzinfo,
    datetime_year,
    import_datetime,
)

from datetime import timezone as _timezone

import_datetime()

cdef object UTC = _timezone.utc
cdef int64_t INSTANT_LEAST = _contract.INSTANT_LEAST, INSTANT_MOST = _contract.INSTANT_MOST
cdef enum:
    SECOND = 1000000            # microseconds


cdef inline bint is_instant(int64_t micros) noexcept:
    return INSTANT_LEAST <= micros <= INSTANT_MOST


cdef instant_of(int64_t micros, bint is_aware):
    """The datetime of an instant for which `is_instant` holds."""
    cdef int64_t seconds = micros // SECOND, days = seconds // 86400, era, day, year, month
    cdef int rest = <int>(seconds - 86400 * days)
    days += 719468                                          # since 0000-03-01
    era = days // 146097                                    # of 400 years
    day = days - 146097 * era
    year = (day - day // 1460 + day // 36524 - day // 146096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153                            # from March on
    day -= (153 * month + 2) // 5
    year += 400 * era + (month > 9)
    month += -9 if month > 9 else 3
    return datetime_new(
        <int>year,
        <int>month,
        <int>(day + 1),
        rest // 3600,
        rest // 60 % 60,
        rest % 60,
        <int>(micros - SECOND * seconds),
        UTC if is_aware else None,
    )


cdef bint micros_of(value, int64_t *micros) except -1:
    """Compute the instant of a plain datetime in UTC; False for every other value."""
    cdef int64_t year, month, day
    if not PyDateTime_CheckExact(value) or datetime_tzinfo(value) is not UTC:
        return False
    year, month = datetime_year(value), datetime_month(value)
    year -= month < 3
    month += 9 if month < 3 else -3
    day = 365 * year + year // 4 - year // 100 + year // 400
    day += (153 * month + 2) // 5 + datetime_day(value) - 1 - 719468
    micros[0] = SECOND * (
        86400 * day + 3600 * datetime_hour(value) + 60 * datetime_minute(value)
        + datetime_second(value)
    ) + datetime_microsecond(value)
    return True
